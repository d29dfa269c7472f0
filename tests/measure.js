// What a browser made of the report in the frame: written as JSON where --dump-dom shows it.
const frame = document.getElementById("frame");
const page = frame.contentDocument, view = frame.contentWindow;
const colour = (text) => text.match(/[\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const part = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = colour(view.getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const contrasts = [];
const walker = page.createTreeWalker(page.body, view.NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
  const style = view.getComputedStyle(element);
  const [a, b] = [light(colour(style.color)), light(behind(element))].sort((x, y) => y - x);
  contrasts.push({
    text: walker.currentNode.data.trim().slice(0, 40),
    ratio: (a + 0.05) / (b + 0.05),
    size: parseFloat(style.fontSize),
  });
}
const boxes = (selector) => [...page.querySelectorAll(selector)].map((element) => {
  const { left, top, right, bottom } = element.getBoundingClientRect();
  return { left, top, right, bottom, text: element.textContent.trim().slice(0, 40) };
});
const cells = [...page.querySelectorAll(".strip span")].map((element) => ({
  verdict: element.className,
  colour: colour(view.getComputedStyle(element).backgroundColor),
  shape: element.querySelector("b").textContent,
}));
document.getElementById("measured").textContent = JSON.stringify({
  page: colour(view.getComputedStyle(page.body).backgroundColor),
  width: page.documentElement.clientWidth,
  scrolls: page.documentElement.scrollWidth - page.documentElement.clientWidth,
  contrasts, cells,
  hidden: [...page.querySelectorAll(".scroll")].map((box) => box.scrollWidth - box.clientWidth),
  blocks: boxes("body > section > *"),
  strip: boxes(".strip span"),
  steps: boxes(".path > li > div"),
  parts: Object.fromEntries(
    ["h1", "dl", ".strip", "table", ".finding", ".source", "pre", ".step", ".end", ".legend"].map(
      (name) => [name, boxes(name)])),
});
