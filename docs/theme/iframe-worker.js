// Browsers give no workers to pages that are opened from the disk. The search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame.contentWindow;
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, document.baseURI);
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      frame.contentDocument.body.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.frame.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
