// The answer to a query: found or not and why, what was found, and below a line what merely looks alike.

import { announce, count, describeColumn, make, oneIn, part, percent, plural, shorten } from "./elements.js";
import { loadThumbnail } from "./pictures.js";

const [NARROWEST, WIDEST] = [0.6, 2.2]; // width by height of a thumbnail in its row; beyond, it is shown whole in that
const COLUMNS_SHOWN = 3;

// `actions`: open(hit), more(), again().
export function showAnswer(answer, entry, index, actions) {
  const matches = answer.hits.filter((hit) => hit.match);
  const others = answer.hits.filter((hit) => !hit.match);
  const verdict = decide(answer, matches, others, entry.query.id !== null);
  part("answer").replaceChildren(
    ...[
      makeVerdict(answer, verdict, index),
      answer.partial ? makePartial(answer, actions) : null,
      matches.length ? makeHits(matches, 0, "Found", actions) : null,
      ...(others.length ? makeOthers(answer, others, matches.length, actions) : []),
      mayHaveMore(answer, entry, index) ? makeMore(actions) : null,
    ].filter(Boolean),
  );
  announce(`${verdict.title}. ${verdict.text}`);
  return verdict;
}

function decide(answer, matches, others, isIndexed) {
  const where = answer.partial ? "the part of the collection that was searched" : "this collection";
  if (!answer.hits.length) return { kind: "none", title: "Nothing found", text: `There is nothing similar in ${where}.` };
  if (answer.found == null) {
    const text = "They look alike. This collection keeps no details to verify that they show the same thing.";
    return { kind: "alike", title: `The ${plural(answer.hits.length, "most similar picture")}`, text };
  }
  const chance = `Chance alone gets that far for ${oneIn(answer.decision.false_alarm_rate)} pairs of unrelated pictures.`;
  if (answer.found) {
    const total = matches.reduce((sum, hit) => sum + 1 + (hit.copies?.length ?? 0), 0);
    const most = others.length ? "" : "At least ";
    const best = Math.max(...matches.map((hit) => hit.inliers));
    const other = isIndexed ? "other " : "";
    const shows = total === 1 ? `1 ${other}picture shows the same thing.` : `${most}${count(total)} ${other}pictures show the same thing.`;
    const enough = `${answer.decision.min_inliers} are enough`;
    const evidence = `The best agrees with yours in ${count(best)} places; ${enough}. ${chance}`;
    return { kind: "found", title: "Found", text: shows, evidence };
  }
  const best = Math.max(0, ...others.map((hit) => hit.inliers ?? 0));
  const agrees = best ? `in ${plural(best, "place")} only` : "nowhere";
  const evidence = `The best of them agrees with yours ${agrees}; a match needs ${answer.decision.min_inliers}. ${chance}`;
  return { kind: "none", title: "Nothing found", text: `No ${isIndexed ? "other " : ""}picture in ${where} shows the same thing.`, evidence };
}

function makeVerdict(answer, { kind, title, text, evidence }, index) {
  const time = `${(answer.timings_ms.total / 1000).toFixed(1)} s`;
  const searched = index ? `${plural(Math.round(answer.coverage * index.images), "picture")} searched in ${time}` : time;
  return make(
    "div", { className: `verdict ${kind}` },
    make("span", { className: "sign", "aria-hidden": "true" }),
    make(
      "div", {},
      make("h2", { textContent: title }),
      make("p", { className: "text", textContent: text }),
      evidence ? make("p", { className: "evidence", textContent: evidence }) : null,
      make("p", { className: "quiet small", textContent: `${searched} · version ${answer.version}` }),
    ),
  );
}

function makePartial(answer, actions) {
  const text = `Only ${percent(answer.coverage)} of the collection could be searched just now. What you look for may be in the rest.`;
  return make(
    "div", { className: "notice warning", id: "partial" },
    make("p", { textContent: text }),
    make("button", { type: "button", className: "plain", textContent: "Search again", onclick: actions.again }),
  );
}

function makeOthers(answer, others, rank, actions) {
  if (answer.found == null) return [makeHits(others, rank, "Most similar", actions)];
  const line = make(
    "div", { className: "line" },
    make("h2", { textContent: "Weak neighbours" }),
    make("p", {
      className: "quiet",
      textContent: "Below this line the evidence is too weak: these pictures look alike, but probably show something else.",
    }),
  );
  return [line, makeHits(others, rank, "Weak neighbours", actions)];
}

function makeHits(hits, rank, label, actions) {
  const cards = hits.map((hit, i) => make("li", {}, makeCard(hit, rank + i + 1, actions)));
  return make("ol", { className: `hits ${hits[0].match ? "matches" : "weak"}`, "aria-label": label }, ...cards);
}

function makeCard(hit, rank, actions) {
  const places = hit.match ? describePlaces(hit.inliers) : plural(hit.inliers ?? 0, "place");
  const fact = hit.inliers == null ? `similarity ${hit.score.toFixed(2)}` : places;
  const copies = hit.copies?.length ? `+ ${plural(hit.copies.length, "copy", "copies")}` : null;
  const image = make("img", { alt: "", draggable: false });
  const thumb = make("span", { className: "thumb" }, image, copies && make("span", { className: "badge", textContent: copies }));
  const card = make(
    "button", { type: "button", className: "hit", title: hit.uri, onclick: () => actions.open(hit) },
    thumb,
    make(
      "span", { className: "caption" },
      make("span", { className: "fact" }, make("span", { className: "rank", textContent: rank }), ` ${fact}`),
      make("span", { className: "name", textContent: shorten(hit.uri) }),
      makeColumns(hit.columns),
    ),
  );
  card.dataset.image = hit.image_id;
  showThumbnail(hit.image_id, image, card);
  return card;
}

export function describePlaces(inliers) {
  if (!inliers) return "no place agrees";
  return inliers === 1 ? "1 place agrees" : `${count(inliers)} places agree`;
}

function makeColumns(columns) {
  const shown = Object.values(columns ?? {}).filter((value) => value !== null && value !== "").slice(0, COLUMNS_SHOWN);
  if (!shown.length) return null;
  return make("span", { className: "quiet columns", textContent: shown.map(describeColumn).join(" · ") });
}

// A card is as wide as its picture asks for, so that all pictures of a row have one height.
export async function showThumbnail(id, image, card) {
  try {
    image.src = await loadThumbnail(id);
    await image.decode();
    const ratio = image.naturalWidth / image.naturalHeight;
    card.parentElement.style.setProperty("--ratio", String(Math.min(Math.max(ratio, NARROWEST), WIDEST)));
  } catch {
    card.classList.add("unseen");
  }
}

function mayHaveMore(answer, entry, index) {
  const shown = answer.hits.reduce((sum, hit) => sum + 1 + (hit.copies?.length ?? 0), 0);
  return shown >= entry.k && entry.k < (index?.limits?.max_k ?? Infinity) && shown < (index?.images ?? Infinity);
}

const makeMore = (actions) =>
  make("button", { type: "button", id: "more", className: "plain", textContent: "Show more", onclick: actions.more });
