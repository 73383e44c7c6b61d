// The state of the page in its address: ?image=12&box=0.1,0.2,0.8,0.9&k=24&hit=7
//
// An indexed image has an address that can be reloaded and sent to others; a file of the visitor has none.
// `box` holds shares of width and height, so that it fits the thumbnail and the original.

export const FIRST_HITS = 12;

export function readAddress(search = location.search) {
  const values = new URLSearchParams(search);
  const box = (values.get("box") ?? "").split(",").map(Number);
  const isBox = box.length === 4 && 0 <= box[0] && box[0] < box[2] && box[2] <= 1 && 0 <= box[1] && box[1] < box[3] && box[3] <= 1;
  return {
    image: readId(values.get("image")),
    box: isBox ? box : null,
    k: readId(values.get("k")) || FIRST_HITS,
    hit: readId(values.get("hit")),
  };
}

const readId = (text) => (/^\d{1,15}$/.test(text ?? "") ? Number(text) : null);

export function formAddress({ image, box, k, hit }) {
  if (image === null) return "./";
  const values = [`image=${image}`];
  if (box) values.push(`box=${box.map((share) => Number(share.toFixed(4))).join(",")}`);
  if (k !== FIRST_HITS) values.push(`k=${k}`);
  if (hit !== null) values.push(`hit=${hit}`);
  return `./?${values.join("&")}`;
}
