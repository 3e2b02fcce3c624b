// What is wrong with the page as it is shown now: the body of a function of the scheme, "light" or "dark", that
// returns sentences. Contrast is WCAG's, 4.5 for text of this size.
const LATEX = /\$\$|\$[^$]*\\|\\[(\[]|\\[a-z]{2,}/;
const found = [];
const words = (element) => element.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
for (const image of document.images)
  if (!image.complete || !image.naturalWidth) found.push(`a picture without pixels: ${image.src}`);
const main = document.querySelector("article") || document.body;
const texts = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode;
  if (text.parentElement.closest("code, pre, script, style, math")) continue;
  if (LATEX.test(text.data)) found.push(`LaTeX among the words: ${text.data.trim()}`);
}
for (const error of main.querySelectorAll("merror")) found.push(`a formula with an error: ${words(error)}`);
for (const link of document.querySelectorAll('a[href^="#"]')) {
  const anchor = decodeURIComponent(link.hash.slice(1));
  if (anchor && !document.getElementById(anchor) && !document.getElementsByName(anchor).length)
    found.push(`an anchor to nothing: ${link.hash}`);
}
const width = document.documentElement.clientWidth, needed = document.documentElement.scrollWidth;
if (needed > width) found.push(`${needed} pixels of page in a window of ${width}`);
const scrolls = (element) => {
  for (let parent = element; parent && parent !== document.body; parent = parent.parentElement)
    if (getComputedStyle(parent).overflowX !== "visible") return true;
  return false;
};
for (const element of main.querySelectorAll("p, li, td, img, math, h1, h2, h3")) {
  const right = element.getBoundingClientRect().right;
  if (right > width + 1 && !scrolls(element))
    found.push(`cut off at ${Math.round(right)} pixels: ${words(element)}`);
}
const channels = (color) => color.match(/[\d.]+/g).map(Number);
const light = (color) => {
  const [r, g, b] = channels(color).slice(0, 3).map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const over = (front, back) => {
  const [r, g, b, a = 1] = channels(front), under = channels(back);
  return `rgb(${[r, g, b].map((x, i) => a * x + (1 - a) * under[i]).join()})`;
};
const ground = getComputedStyle(document.body).backgroundColor;
if ((light(ground) > 0.5) !== (arguments[0] === "light")) found.push(`the ground is ${ground}`);
for (const kind of ["p", "li", "td", "math", "h2"]) {
  const element = main.querySelector(kind);
  if (!element) continue;
  const [a, b] = [light(over(getComputedStyle(element).color, ground)), light(ground)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) found.push(`words of contrast ${contrast.toFixed(1)} in <${kind}>`);
}
return found;
