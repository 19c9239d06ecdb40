// Sorts a table by the column of the button that is clicked: numbers from high to low first, names from A to Z first.
const value = (row, column) => {
  const text = row.cells[column].textContent.trim();
  const number = Number(text.replace(/[,%\s]/g, ""));
  return column === 0 ? text : Number.isNaN(number) ? -1 : number;
};
const compare = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const first = column === 0 ? "ascending" : "descending";
    const second = column === 0 ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === first ? second : first;
    const sign = order === "ascending" ? 1 : -1;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => sign * compare(value(a, column), value(b, column)));
    body.append(...rows);
  }));
}
