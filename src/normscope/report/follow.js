// A page that follows a run: from a file it loads itself again, over HTTP it fetches what is new; what is in view stays there.
(() => {
  "use strict";
  const { follow } = JSON.parse(document.getElementById("figures-data").textContent);
  const root = document.documentElement, pause = seconds => new Promise(done => setTimeout(done, 1000 * seconds));

  // The element at the top of the window, by its id, and where its upper edge is.
  const blocks = () => [...document.querySelectorAll("main section[id], main figure[id]")];
  const anchor = () => {
    const seen = blocks().map(block => [block.id, block.getBoundingClientRect()]).filter(([, { top, bottom }]) => bottom > 0 && top < innerHeight);
    const [id, box] = seen.at(-1) ?? [];
    return id && scrollY > 0 ? { id, top: box.top } : null;
  };

  // From a file: what the reader did to the page is there again when it has loaded.
  function remember() {
    const heights = [...document.querySelectorAll(".plot")].map(plot => plot.offsetHeight);
    const open = [...document.querySelectorAll("details")].map(details => details.open);
    sessionStorage.setItem(normscope.key, JSON.stringify({ place: anchor(), heights, open, theme: root.dataset.theme ?? "" }));
  }
  async function reload() {
    await pause(follow.seconds);
    while (document.hidden) await pause(1);
    remember();
    location.reload();
  }

  // Over HTTP: the server answers when there is a new page.
  async function listen() {
    for (let known = follow.version;;) {
      try {
        const { version } = await (await fetch(`${follow.news}?after=${known}`)).json();
        if (version === known) continue;
        const later = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html"), place = anchor();
        if (!window.vegaEmbed) return location.reload();  // the first page had no figure, and nothing to draw one
        normscope.renew(later);
        normscope.restore(place);
        known = JSON.parse(later.getElementById("figures-data").textContent).follow.version;
      } catch {
        await pause(2);  // the server has gone, or is starting again
      }
    }
  }
  (follow.news ? listen : reload)();
})();
