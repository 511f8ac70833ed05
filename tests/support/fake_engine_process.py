"""A process that starts and ends like an engine: binds a port, writes the ready file, dies with its parent.

`python fake_engine_process.py PORT READY_FILE LIFE_FD MOOD_FILE [HOST]`. The mood file is read at start
("dies": ends before it serves, "silent": never serves) and at each question ("sick": answers 503; "spins":
computes and does not answer, until its mood changes; otherwise it says that it holds weights named like its
mood).
"""

import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path


def main() -> None:
    port, ready, life_fd, mood = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    threading.Thread(target=lambda: (os.read(life_fd, 1), os._exit(1)), daemon=True).start()
    if mood.read_text() == "dies":
        sys.exit("the model folder is empty")
    if mood.read_text() == "silent":
        time.sleep(600)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while mood.read_text() == "spins":
                pass
            self.send_response(503 if mood.read_text() == "sick" else 200)
            body = json.dumps({"weight_version": mood.read_text()}).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the log empty."""

    host = sys.argv[5] if len(sys.argv) > 5 else "127.0.0.1"
    server = http.server.ThreadingHTTPServer((host, port), Handler)
    temporary = ready.with_suffix(".tmp")
    temporary.write_text(json.dumps({"port": server.server_address[1], "pid": os.getpid()}))
    temporary.rename(ready)
    server.serve_forever()


if __name__ == "__main__":
    main()
