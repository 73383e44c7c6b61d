// 3 × 3 transforms of the plane as rows, and the CSS that shows an image under one.

export const multiply = (a, b) => a.map((row) => [0, 1, 2].map((j) => row.reduce((sum, one, k) => sum + one * b[k][j], 0)));

export const scaling = (x, y) => [[x, 0, 0], [0, y, 0], [0, 0, 1]];

export const placing = (scale, x, y) => [[scale, 0, x], [0, scale, y], [0, 0, 1]];

export function apply(m, [x, y]) {
  const [u, v, w] = m.map((row) => row[0] * x + row[1] * y + row[2]);
  return [u / w, v / w];
}

// CSS lists a 4 × 4 matrix by columns; depth is left alone.
export function toCss([a, b, c]) {
  return `matrix3d(${a[0]},${b[0]},0,${c[0]}, ${a[1]},${b[1]},0,${c[1]}, 0,0,1,0, ${a[2]},${b[2]},0,${c[2]})`;
}

// Where two images fit beside or above each other in an area, as large as that goes: two { scale, x, y }.
export function fitBeside([width, height], sizes, gap) {
  const beside = sizes.map(([w, h]) => Math.min((width - gap) / 2 / w, height / h));
  const above = sizes.map(([w, h]) => Math.min(width / w, (height - gap) / 2 / h));
  const area = (scales) => scales.reduce((sum, scale, i) => sum + scale * scale * sizes[i][0] * sizes[i][1], 0);
  if (area(beside) >= area(above)) {
    const total = beside[0] * sizes[0][0] + gap + beside[1] * sizes[1][0];
    const left = (width - total) / 2;
    return [left, left + beside[0] * sizes[0][0] + gap].map((x, i) => ({
      scale: beside[i], x, y: (height - beside[i] * sizes[i][1]) / 2,
    }));
  }
  const total = above[0] * sizes[0][1] + gap + above[1] * sizes[1][1];
  const top = (height - total) / 2;
  return [top, top + above[0] * sizes[0][1] + gap].map((y, i) => ({
    scale: above[i], x: (width - above[i] * sizes[i][0]) / 2, y,
  }));
}

// { scale, x, y } that shows an image and what lies on it under `transform`, up to half its size beyond its edges.
export function fitRegistered([width, height], [ownSize, otherSize], transform) {
  const [w, h] = ownSize;
  const corners = [[0, 0], [1, 0], [1, 1], [0, 1]].map(([x, y]) => apply(transform, [x * otherSize[0], y * otherSize[1]]));
  const limit = (value, size) => Math.min(Math.max(value, -size / 2), 1.5 * size);
  const xs = [0, w, ...corners.map(([x]) => limit(x, w))];
  const ys = [0, h, ...corners.map(([, y]) => limit(y, h))];
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const scale = Math.min(width / (right - left), height / (bottom - top));
  return {
    scale,
    x: (width - scale * (right - left)) / 2 - scale * left,
    y: (height - scale * (bottom - top)) / 2 - scale * top,
  };
}
