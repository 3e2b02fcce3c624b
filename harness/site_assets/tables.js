// Tables sort by the column whose head is clicked: as numbers where both cells begin with one.
document.addEventListener("click", (event) => {
  const head = event.target.closest("article table thead th");
  if (!head) return;
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const down = head.dataset.order !== "down";
  for (const other of table.querySelectorAll("th")) delete other.dataset.order;
  head.dataset.order = down ? "down" : "up";
  const value = (row) => row.cells[column].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [parseFloat(a.replace("−", "-")), parseFloat(b.replace("−", "-"))];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };
  const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(value(a), value(b)));
  body.append(...rows);
});
