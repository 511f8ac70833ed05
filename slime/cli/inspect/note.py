"""`slime note RUN [TEXT] [--tags A,B]`: show or change the note and the tags of a run."""

from collections.abc import Sequence

from slime.cli.inspect import command, need_run, run_parser
from slime.record.labels import read_labels, write_labels
from slime.utils.printable import printable


@command
def main(argv: Sequence[str]) -> int:
    parser = run_parser("note", __doc__)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the new note; '' removes it")
    parser.add_argument("--tags", metavar="A,B", help="the new tags, separated by commas; '' removes them")
    options = parser.parse_args(argv)
    need_run(options.run)
    now = read_labels(options.run)
    tags = now["tags"] if options.tags is None else options.tags.split(",")
    note = now["note"] if options.text is None else options.text
    if (tags, note) != (now["tags"], now["note"]):
        now = write_labels(options.run, tags, note)
    print(printable(f"tags: {', '.join(now['tags']) or 'none'}\nnote: {now['note'] or 'none'}"))
    return 0
