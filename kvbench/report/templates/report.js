(function () {
  "use strict";
  function value(row, place) { return row.cells[place].getAttribute("data-v"); }
  function compare(a, b) {
    if (a === "" || b === "") { return (a === "") - (b === ""); }
    var x = Number(a), y = Number(b);
    return isNaN(x) || isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  }
  function sort(heading) {
    var table = heading.closest("table"), body = table.tBodies[0];
    var place = heading.cellIndex, down = heading.getAttribute("aria-sort") === "ascending";
    var rows = Array.prototype.slice.call(body.rows);
    rows.sort(function (a, b) {
      var x = value(a, place), y = value(b, place);
      if (x === "" || y === "") { return compare(x, y); }
      return down ? compare(y, x) : compare(x, y);
    });
    table.querySelectorAll("th[aria-sort]").forEach(function (other) { other.setAttribute("aria-sort", "none"); });
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.forEach(function (row) { body.appendChild(row); });
  }
  document.addEventListener("click", function (event) {
    var button = event.target.closest("th button");
    if (button) { sort(button.closest("th")); }
  });
  var shut = [];
  addEventListener("beforeprint", function () {
    shut = Array.prototype.slice.call(document.querySelectorAll("details:not([open]):not(.bulk)"));
    shut.forEach(function (each) { each.open = true; });
  });
  addEventListener("afterprint", function () { shut.forEach(function (each) { each.open = false; }); });
}());
