(function () {
  "use strict";
  function value(row, place) {
    var cell = row.cells[place], known = cell.getAttribute("data-v"), text = cell.textContent;
    return known !== null ? known : text === "–" ? "" : text;
  }
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
  // Marks say their values: a browser's own <title> comes late, and on a phone never.
  document.querySelectorAll(".plot title").forEach(function (title) {
    title.parentNode.setAttribute("data-value", title.textContent);
    title.remove();
  });
  var box = document.getElementById("value"), NEAR = 16;
  function nearest(svg, x, y) {
    var found = null, least = NEAR;
    svg.querySelectorAll("use[data-value]").forEach(function (mark) {
      var at = mark.getBoundingClientRect();
      var away = Math.hypot(at.left + at.width / 2 - x, at.top + at.height / 2 - y);
      if (at.width && away < least) { least = away; found = mark; }
    });
    return found;
  }
  function show(event) {
    var svg = event.target.closest && event.target.closest(".plot svg");
    var mark = svg && (nearest(svg, event.clientX, event.clientY) || event.target.closest("[data-value]"));
    box.hidden = !mark;
    if (!mark) { return; }
    box.textContent = mark.getAttribute("data-value");
    box.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 4)) + "px";
    box.style.top = Math.max(4, event.clientY - box.offsetHeight - 10) + "px";
  }
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  addEventListener("scroll", function () { box.hidden = true; }, { passive: true });
  var filter = document.querySelector(".filter");
  if (filter) {
    filter.hidden = false;
    filter.addEventListener("change", function () {
      var off = Array.prototype.map.call(filter.querySelectorAll("input:not(:checked)"), function (each) { return each.value; });
      document.querySelectorAll("[data-series]").forEach(function (each) {
        each.classList.toggle("off", off.indexOf(each.getAttribute("data-series")) >= 0);
      });
    });
  }
  var shut = [];
  addEventListener("beforeprint", function () {
    shut = Array.prototype.slice.call(document.querySelectorAll("details:not([open]):not(.bulk)"));
    shut.forEach(function (each) { each.open = true; });
  });
  addEventListener("afterprint", function () { shut.forEach(function (each) { each.open = false; }); });
}());
