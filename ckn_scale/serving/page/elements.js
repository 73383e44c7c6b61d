// Elements and words of the page. What comes from outside is set as text, never as markup.

export const part = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const count = (number) => number.toLocaleString("en");

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

// 1e-6 → "1 in 1,000,000"
export const oneIn = (rate) => `1\u00a0in\u00a0${count(Math.round(1 / rate))}`;

export const percent = (share) => `${Math.round(100 * share)}\u00a0%`;

// The end of an address tells images apart; the whole of it is shown where there is room.
export function shorten(uri) {
  const parts = uri.split("/");
  return parts.length > 2 ? parts.at(-1) || parts.at(-2) : uri;
}

export function describeColumn(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Read out by screen readers; what is seen stands elsewhere.
export function announce(text, where = "status") {
  part(where).textContent = text;
}
