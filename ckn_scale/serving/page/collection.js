// The page before the first search: what is in the collection, pictures of it to try, how well it answers.

import { count, make, oneIn, part, percent, plural, shorten } from "./elements.js";
import { showThumbnail } from "./answer.js";

const VIEW_NAMES = {
  tilt: "seen at an angle", crop: "cut out", turn: "turned", shrink: "small", blur: "blurred",
  relight: "in other light", compress: "heavily compressed",
};

export function showCollection(index, examples, onTry) {
  part("examples").hidden = !examples.length;
  part("example-list").replaceChildren(...examples.map((image) => make("li", {}, makeExample(image, onTry))));
  part("about").replaceChildren(...describeCollection(index));
}

function makeExample({ image_id, uri }, onTry) {
  const image = make("img", { alt: "", draggable: false });
  const properties = { type: "button", className: "example", title: uri, onclick: () => onTry(image_id) };
  const button = make("button", { ...properties, "aria-label": `Search with ${shorten(uri)}` }, image);
  showThumbnail(image_id, image, button);
  return button;
}

function describeCollection(index) {
  const certificate = index.certificate;
  const figures = [makeFigure(count(index.images), index.images === 1 ? "picture" : "pictures")];
  const sentences = [];
  if (certificate?.queries) {
    figures.push(makeFigure(percent(certificate.first_share), "of altered pictures found their original first"));
    sentences.push(...describeTest(certificate));
  } else {
    sentences.push("It was published without a test of how well it answers.");
  }
  const evidence = certificate?.evidence;
  const [rate, places] = strictest(evidence?.thresholds);
  if (rate) {
    figures.push(makeFigure(oneIn(rate), "unrelated pairs taken for a match by chance"));
    sentences.push(...describeEvidence(evidence, places));
  } else if (!index.can_verify) {
    sentences.push("It keeps no details of its pictures: answers are the most similar ones, without a yes or no.");
  }
  const heading = make("h2", { textContent: "How far you can trust it" });
  const views = makeViews(certificate?.by_view ?? {});
  const text = sentences.map((textContent) => make("p", { textContent }));
  return [make("div", { className: "figures" }, ...figures), heading, ...text, views].filter(Boolean);
}

function describeTest(certificate) {
  const { queries, first, lower, confidence, target, passed, accepted, behind_copies, carried_from } = certificate;
  const behind = behind_copies ? ` (${count(behind_copies)} of them behind copies of it)` : "";
  const sentences = [
    `Before this collection was published it was asked for ${count(queries)} of its own pictures after they had been altered ` +
      `as photographs are: cut, turned, darkened, blurred. For ${count(first)} the original came first${behind}. ` +
      `For all its pictures that is at least ${percent(lower)}, with ${percent(confidence)} confidence.`,
  ];
  if (!passed && accepted) sentences.push(`That is less than the ${percent(target)} its makers aimed at; they published it knowing that.`);
  if (carried_from) sentences.push("Pictures were deleted since; without them the others only come sooner.");
  return sentences;
}

function describeEvidence({ planted, matched, other_pairs }, places) {
  const tried = Object.values(other_pairs ?? {}).reduce((sum, pairs) => sum + pairs, 0);
  const recognised = planted ? ` Of ${count(planted)} altered pictures ${count(matched)} were recognised by that rule.` : "";
  const measured = tried ? `, as measured on ${plural(tried, "pair")} of unrelated pictures` : "";
  return [
    `“Found” means that at least ${plural(places, "place")} of both pictures agree and lie in the same arrangement. ` +
      `Chance rarely gets that far${measured}.${recognised}`,
  ];
}

// The thresholds as pairs of a rate and the places it takes: what is decided by is the rarest.
function strictest(thresholds) {
  const pairs = Object.entries(thresholds ?? {}).map(([rate, places]) => [Number(rate), places]);
  return pairs.sort(([a], [b]) => a - b)[0] ?? [null, null];
}

const makeFigure = (figure, label) =>
  make("p", { className: "figure" }, make("strong", { textContent: figure }), make("span", { className: "quiet", textContent: label }));

function makeViews(shares) {
  const rows = Object.entries(shares).map(([view, share]) => {
    const bar = make("span", { className: "bar", "aria-hidden": "true" }, make("span", {}));
    bar.firstChild.style.width = percent(share).replace(" ", "");
    return make("li", {}, make("span", { textContent: VIEW_NAMES[view] ?? view }), bar, make("span", { textContent: percent(share) }));
  });
  if (!rows.length) return null;
  const summary = make("summary", { textContent: "How it did, by kind of change" });
  return make("details", {}, summary, make("ul", { className: "views" }, ...rows));
}
