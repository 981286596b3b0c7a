// Browsers start no Worker for a page that was opened from the disk. The search of the site runs in one, so on such pages (and only there)
// the name Worker means a hidden frame that runs the same script and passes the same messages.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.receive(data);
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href).href;
      script.addEventListener("load", () => {
        const early = this.waiting;
        this.waiting = null;
        early.forEach((data) => this.deliver(data));
      });
      inside.document.body.append(script);
    }

    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    // A message that comes before the script has been read waits for it.
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.deliver(data);
    }

    deliver(data) {
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
