(function () {
  "use strict";
  function at(id) { return document.getElementById(id); }
  function say(id, text) { at(id).textContent = text; }
  function short(value) {
    return value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(3)));
  }
  function row(cells) {
    var line = document.createElement("tr");
    cells.forEach(function (cell) {
      var place = document.createElement("td");
      if (cell.node) { place.appendChild(cell.node); }
      place.appendChild(document.createTextNode(cell.text));
      if (cell.kind) { place.className = cell.kind; }
      line.appendChild(place);
    });
    return line;
  }
  function share(value) {
    if (value === null) { return { text: "–" }; }
    var meter = document.createElement("meter");
    meter.value = value;
    return { node: meter, text: " " + (value * 100).toFixed(1) + " %" };
  }
  function pairs(id, list) {
    at(id).replaceChildren.apply(at(id), list.map(function (pair) {
      var group = document.createElement("div"), name = document.createElement("dt"), value = document.createElement("dd");
      name.textContent = pair[0]; value.textContent = pair[1];
      group.append(name, value);
      return group;
    }));
  }
  function show(seen) {
    document.title = seen.cells_done + "/" + seen.cells_planned + " · " + seen.title;
    say("title", seen.title); say("caption", seen.caption);
    say("state", seen.status + (seen.error ? ": " + seen.error : "")); at("state").className = seen.status;
    say("cells", seen.cells_done + " of " + seen.cells_planned + " " + seen.unit + ", " + seen.log.length + " measured");
    var live = seen.live;
    say("time", [seen.elapsed, live.what, live.count, live.trial, live.rate, live.left].filter(Boolean).join(" · "));
    at("bar").value = live.share || 0;
    say("cell", seen.cell || "…");
    var curve = seen.curve.slice().sort(function (a, b) { return a.request_rate - b.request_rate; });
    at("curve").replaceChildren.apply(at("curve"), curve.map(function (line) {
      return row([{ text: short(line.request_rate) }, share(line.slo_attainment), { text: short(line.ttft_ms_p50) },
        { text: short(line.ttft_ms_p99) }, { text: short(line.tpot_ms_p50) },
        { text: line.verdict, kind: "text " + line.verdict }]);
    }));
    pairs("load", seen.load); pairs("nics", seen.nics);
    at("log").replaceChildren.apply(at("log"), seen.log.slice().reverse().map(function (line) {
      return row([{ text: line.at }, { text: line.connector, kind: "text" }, { text: line.where },
        { text: line.speed }, { text: line.verdict, kind: "text " + line.verdict },
        { text: line.reason, kind: "why" }]);
    }));
  }
  function refresh() {
    fetch("/state.json", { cache: "no-store" }).then(function (answer) { return answer.json(); }).then(function (seen) {
      if (seen.log) { show(seen); } else { say("state", seen.error); }
      if (!seen.status || seen.status === "running") { setTimeout(refresh, 1000); }
    }).catch(function () { say("state", "kvbench watch has ended; this is the last it said"); });
  }
  refresh();
}());
