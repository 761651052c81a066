// Browsers allow no workers on pages that are opened as files. The search's worker runs in a hidden frame there instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.inside = new Promise((ready) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          const script = inside.document.createElement("script");
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          script.onload = () => ready(inside);
          script.src = url;
          inside.document.body.append(script);
        };
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
