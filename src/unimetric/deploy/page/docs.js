"use strict";
const make = (name, text, parent, kind = "") => {
  const element = document.createElement(name);
  element.textContent = text;
  if (kind) element.className = kind;
  parent.append(element);
  return element;
};

function table(rows, parent) {
  if (!rows.length) return;
  const found = make("table", "", parent), head = make("tr", "", found);
  for (const text of ["field", "type", "meaning"]) make("th", text, head);
  for (const row of rows) {
    const line = make("tr", "", found);
    row.forEach((text, number) => make(number ? "td" : "th", text, line));
  }
}

fetch("/openapi.json").then((response) => response.json()).then((described) => {
  document.getElementById("here").textContent = location.origin;
  const place = document.getElementById("paths");
  for (const [path, methods] of Object.entries(described.paths))
    for (const [method, each] of Object.entries(methods)) {
      const title = make("h2", "", place);
      make("span", `${method.toUpperCase()} `, title, "method");
      make("span", path, title);
      make("p", each.summary, place);
      const fields = (each.parameters ?? []).map((one) => [one.name, one.schema?.type ?? "", one.description ?? ""]);
      const form = each.requestBody?.content["multipart/form-data"]?.schema;
      for (const [name, one] of Object.entries(form?.properties ?? {}))
        fields.push([form.required.includes(name) ? `${name} *` : name, one.format ?? one.type, one.description]);
      table(fields, place);
    }
});
