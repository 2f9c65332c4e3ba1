"use strict";
// Shows the page anew every two seconds, in place: what has focus, is open or is scrolled stays so.
(() => {
  const PERIOD_MS = 2000, PATIENCE_MS = 8000;
  const [pause, freshness, away] = ["pause", "freshness", "away"].map((id) => document.getElementById(id));
  let isPaused = false, seen = Date.now();

  function morph(from, to) {
    for (const { name, value } of to.attributes) if (name !== "open" && from.getAttribute(name) !== value) from.setAttribute(name, value);
    for (const { name } of [...from.attributes]) if (name !== "open" && !to.hasAttribute(name)) from.removeAttribute(name);
    const wanted = [...to.childNodes], ids = new Set(wanted.map((node) => node.id).filter(Boolean));
    for (const child of [...from.children]) if (child.id && !ids.has(child.id)) child.remove();
    const known = new Map([...from.children].filter((child) => child.id).map((child) => [child.id, child]));
    let here = from.firstChild;
    for (const node of wanted) {
      const match = node.id ? known.get(node.id) : here && !here.id && here.nodeName === node.nodeName ? here : null;
      if (!match) { from.insertBefore(document.importNode(node, true), here); continue; }
      if (match === here) here = here.nextSibling; else from.insertBefore(match, here);
      if (node.nodeType === Node.ELEMENT_NODE) morph(match, node);
      else if (match.data !== node.data) match.data = node.data;
    }
    while (here) { const next = here.nextSibling; here.remove(); here = next; }
  }

  function show(text) {
    const page = new DOMParser().parseFromString(text, "text/html"), focused = document.activeElement;
    if (!page.getElementById("epoch")) throw new Error("no page");
    document.title = page.title;
    for (const part of document.querySelectorAll("[data-live]")) morph(part, page.getElementById(part.id));
    if (document.activeElement !== focused && focused && focused.isConnected) focused.focus({ preventScroll: true });
  }

  function tell() {
    freshness.textContent = isPaused ? "paused" : "updates every 2 s";
  }

  async function look() {
    if (isPaused || document.hidden) return;
    try {
      const answer = await fetch(location.pathname, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
      if (!answer.ok) throw new Error(answer.status);
      show(await answer.text());
      seen = Date.now();
      away.hidden = true;
      document.body.classList.remove("is-away");
    } catch {
      const since = new Date(seen).toISOString().slice(11, 19);
      const text = `The server is away: nothing has come since ${since} UTC. What is below is of then.`;
      if (away.textContent !== text || away.hidden) { away.textContent = text; away.hidden = false; }
      document.body.classList.add("is-away");
    }
  }

  async function follow() {
    await look();
    setTimeout(follow, PERIOD_MS);
  }

  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", isPaused);
    tell();
  });
  document.addEventListener("visibilitychange", look);
  pause.hidden = freshness.hidden = false;
  tell();
  setTimeout(follow, PERIOD_MS);
})();
