"use strict";

function make(tag, text, ...children) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
}

function resolve(schema, all) {
  return schema && schema.$ref ? all.components.schemas[schema.$ref.split("/").pop()] : schema || {};
}

function typeOf(schema, all) {
  if (schema.$ref) return typeOf(resolve(schema, all), all);
  if (schema.anyOf) return schema.anyOf.map((one) => typeOf(one, all)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.prefixItems) return `list of ${schema.prefixItems.length}: ${typeOf(schema.prefixItems[0], all)}`;
  if (schema.type === "array") return `list of ${typeOf(schema.items || {}, all)}`;
  if (schema.format === "binary") return "file";
  return schema.type || "anything";
}

function table(rows) {
  const body = make("tbody");
  for (const [name, type, text] of rows) {
    body.append(make("tr", "", make("td", name), make("td", type), make("td", text)));
  }
  return make("table", "", body);
}

function fields(schema, all) {
  const found = resolve(schema, all);
  const needed = new Set(found.required || []);
  return Object.entries(found.properties || {}).map(([name, one]) => {
    const preset = one.default === undefined || one.default === null ? "" : `, default ${JSON.stringify(one.default)}`;
    return [name, typeOf(one, all) + (needed.has(name) ? "" : preset), one.description || ""];
  });
}

function describe(method, path, route, all) {
  const name = `${method.toUpperCase()} ${path}`;
  const section = make("section", "", make("h2", name), make("p", route.description || route.summary));
  section.id = route.operationId;
  if (route.parameters && route.parameters.length) {
    const rows = route.parameters.map((one) => [one.name, typeOf(one.schema, all), `${one.in}; ${one.description || ""}`]);
    section.append(make("h3", "Parameters"), table(rows));
  }
  for (const [kind, body] of Object.entries((route.requestBody || { content: {} }).content)) {
    section.append(make("h3", `Body: ${kind}`));
    const rows = fields(body.schema, all);
    section.append(rows.length ? table(rows) : make("p", "the image file itself"));
  }
  for (const [status, answer] of Object.entries(route.responses)) {
    const [kind, content] = Object.entries(answer.content || {})[0] || ["", {}];
    if (status !== "200") continue;
    section.append(make("h3", `Answer: ${kind}`));
    const rows = fields(content.schema, all);
    if (rows.length) section.append(table(rows));
  }
  section.append(make("p", `Errors: ${Object.keys(route.responses).filter((one) => one !== "200").join(", ") || "none"}`));
  return section;
}

async function show() {
  const all = await (await fetch("openapi.json")).json();
  const list = make("ul");
  const paths = document.getElementById("paths");
  paths.replaceChildren();
  for (const [path, methods] of Object.entries(all.paths)) {
    for (const [method, route] of Object.entries(methods)) {
      const link = make("a", `${method.toUpperCase()} ${path}`);
      link.href = `#${route.operationId}`;
      list.append(make("li", "", link));
      paths.append(describe(method, path, route, all));
    }
  }
  document.getElementById("contents").replaceChildren(list);
}

show().catch(() => {
  document.getElementById("paths").replaceChildren(make("p", "The description could not be loaded: openapi.json has it."));
});
