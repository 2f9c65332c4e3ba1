// What a person with other eyes or hands would stumble over, as a list of sentences; run in the page.
const found = [];
const visible = (node) => node.checkVisibility({ visibilityProperty: true }) && node.getClientRects().length > 0;

function rgba(text) {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = text;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}

function background(node) {
  for (let at = node; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour[3] === 1) return colour;
    if (colour[3] > 0) throw new Error("a background that lets others through is not judged");
  }
  return [255, 255, 255, 1];
}

function luminance([r, g, b]) {
  const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
}

function contrast(one, other) {
  const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

// WCAG 1.4.3: text of this size has at least 4.5 to 1.
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let judged = 0;
while (texts.nextNode()) {
  const node = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !visible(node) || node.closest("script, style, .hidden, .skip:not(:focus)")) continue;
  judged += 1;
  const ratio = contrast(rgba(getComputedStyle(node).color), background(node));
  if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)} of "${texts.currentNode.data.trim().slice(0, 30)}"`);
}
if (judged < 100) found.push(`only ${judged} texts were judged`);

// WCAG 1.4.11: what is no text, and means something, has at least 3 to 1.
for (const node of document.querySelectorAll(".bar .held, .timeline rect")) {
  const ratio = contrast(rgba(getComputedStyle(node).fill), background(node.closest("section")));
  if (ratio < 3) found.push(`contrast ${ratio.toFixed(2)} of ${node.getAttribute("class")}`);
}

// WCAG 2.5.8: what is pressed has 24 pixels, or is part of a sentence.
for (const node of document.querySelectorAll("button, nav a, summary")) {
  const box = node.getBoundingClientRect();
  if (visible(node) && box.height < 20) found.push(`${node.textContent.trim().slice(0, 20)} is ${box.height} high`);
}

// WCAG 1.3.1 and 4.1.2: tables, regions and headings have names; nothing skips a level.
let level = 0;
for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
  const next = Number(heading.tagName[1]);
  if (next > level + 1) found.push(`${heading.textContent} skips a level`);
  level = next;
}
for (const table of document.querySelectorAll("table")) {
  if (!table.caption?.textContent.trim()) found.push("a table without a caption");
  if (!table.querySelector("thead th[scope=col]")) found.push("a table without headers");
}
for (const region of document.querySelectorAll(".scroll")) {
  const scrolls = region.scrollHeight > region.clientHeight + 1 || region.scrollWidth > region.clientWidth + 1;
  if (scrolls && region.tabIndex !== 0) found.push("a region that only a mouse can scroll");
}
return found;
