// Creates elements without parsing markup: text is always a text node or an attribute's value.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null).map(asNode));
  return node;
}

const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

export const html = (tag, attributes = {}, ...children) => (
  filled(document.createElement(tag), attributes, children));

export const svg = (tag, attributes = {}, ...children) => (
  filled(document.createElementNS(SVG, tag), attributes, children));

// Makes the children of `parent` equal to `nodes`, changing only differences, so that a selection
// and the scroll position stay.
export function show(parent, ...children) {
  const nodes = children.filter((child) => child !== null).map(asNode);
  const before = [...parent.childNodes];
  nodes.forEach((node, place) => {
    if (place < before.length) become(before[place], node);
    else parent.append(node);
  });
  before.slice(nodes.length).forEach((node) => node.remove());
}

function become(node, wanted) {
  if (node.isEqualNode(wanted)) return;
  if (node.nodeName !== wanted.nodeName) {
    node.replaceWith(wanted);
  } else if (node.nodeType === Node.TEXT_NODE) {
    node.data = wanted.data;
  } else {
    for (const name of node.getAttributeNames()) {
      if (!wanted.hasAttribute(name)) node.removeAttribute(name);
    }
    for (const name of wanted.getAttributeNames()) {
      const value = wanted.getAttribute(name);
      if (node.getAttribute(name) !== value) node.setAttribute(name, value);
    }
    show(node, ...wanted.childNodes);
  }
}

// A table that becomes a list of cards on narrow screens; roles keep it a table for screen readers.
// `columns` are [name, kind]; a kind is a class or
// more: "number" is aligned right, "minor" is hidden on narrow screens.
export function table(caption, columns, rows) {
  const head = columns.map(([name, kind = ""]) => (
    html("th", { scope: "col", role: "columnheader", class: kind }, name)));
  const body = rows.map((cells) => html("tr", { role: "row" }, ...cells.map((cell, place) => {
    const [name, kind = ""] = columns[place];
    const title = kind.includes("long") ? cell?.textContent ?? cell : null;
    return html("td", { role: "cell", class: kind, "data-name": name, title }, cell ?? "–");
  })));
  return html("table", { role: "table" },
    html("caption", {}, caption),
    html("thead", { role: "rowgroup" }, html("tr", { role: "row" }, ...head)),
    html("tbody", { role: "rowgroup" }, ...body));
}

// A bar of parts, each [share of the whole, class]; `label` is the same as text.
export function bar(label, parts) {
  let from = 0;
  const rects = parts.filter(([part]) => part > 0).map(([part, kind]) => {
    const x = from;
    from += part;
    return svg("rect", { x: percent(x), width: percent(part), height: "100%", class: kind });
  });
  return svg("svg", { class: "bar", role: "img", "aria-label": label },
    svg("title", {}, label), ...rects);
}

const percent = (part) => `${(100 * Math.min(1, part)).toFixed(2)}%`;
