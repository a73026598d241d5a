"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const controls = ["policy", "category", "kind", "regret", "search", "sort", "prompt"];
  const [policy, category, kind, regret, search, sort, prompt] = controls.map(byId);
  const answer = byId("answer");
  const at = Object.fromEntries(data.fields.map((field, index) => [field, index + 2]));
  const interned = new Set(data.interned);
  const byPolicy = data.answers.map((one) => new Map(one.policies));
  let rounds = [];
  let current = null;
  let place = 0;
  let timer = 0;

  // All text enters the page through here, as text; control characters become visible signs.
  function element(name, text = "", className = "") {
    const made = document.createElement(name);
    made.textContent = visible(text);
    made.className = className;
    return made;
  }

  function visible(text) {
    return String(text)
      .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
      .replace(/\u007f/g, "\u2421")
      .replace(/[\u0080-\u009f]/g, "\ufffd");
  }

  function value(round, field) {
    const found = round[at[field]];
    return found !== null && interned.has(field) ? data.strings[found] : found;
  }

  const armOf = (round) => data.arms[round[1]][0];
  const isStart = (round) => armOf(round) === data.start;

  // ---- choosing ----

  // Options have "=" before their value, so that no name is taken for "all".
  function fill(select, options, wanted) {
    select.replaceChildren(...options.map(([name, text]) => {
      const option = element("option", text);
      option.value = name;
      return option;
    }));
    const known = options.find(([name]) => name === wanted) || options[0];
    if (known) select.value = known[0];
  }

  function fillChoices(wanted) {
    const distinct = (names) => [...new Set(names)].map((name) => ["=" + name, name]);
    const policies = distinct(byPolicy.flatMap((rounds) => [...rounds.keys()]));
    fill(policy, policies, wanted.policy ?? "=" + data.policy);
    fill(category, [["", "all"], ...distinct(data.answers.map((one) => one.category))], wanted.category);
    const kinds = new Set();
    for (const answers of byPolicy) {
      for (const all of answers.values()) for (const round of all) kinds.add(round[at.kind]);
    }
    const named = [...kinds].filter((index) => index !== null && data.strings[index] !== "");
    fill(kind, [["", "all"], ...distinct(named.map((index) => data.strings[index]))], wanted.kind);
    regret.value = wanted.regret ?? "0";
    if (regret.selectedIndex < 0) regret.value = "0";
    search.value = wanted.search ?? "";
    sort.value = wanted.sort === "regret" ? "regret" : "";
  }

  const looksForRounds = () => kind.value !== "" || regret.value !== "0";

  function isLookedFor(round) {
    if (isStart(round) && looksForRounds()) return false;
    if (kind.value !== "" && value(round, "kind") !== kind.value.slice(1)) return false;
    return regret.value === "0" || (value(round, "regret") ?? 0) >= Number(regret.value);
  }

  // [index of the answer, summed regret] of the prompts that pass all filters
  function chosenPrompts() {
    const wanted = search.value.trim().toLowerCase();
    const found = [];
    data.answers.forEach((one, index) => {
      const all = byPolicy[index].get(policy.value.slice(1));
      if (!all || (category.value !== "" && one.category !== category.value.slice(1))) return;
      if (!one.id.toLowerCase().includes(wanted)) return;
      if (looksForRounds() && !all.some(isLookedFor)) return;
      const known = all.filter((round) => value(round, "regret") !== null);
      found.push([index, known.length ? known.reduce((sum, round) => sum + value(round, "regret"), 0) : null]);
    });
    if (sort.value) found.sort((a, b) => (b[1] ?? -1) - (a[1] ?? -1));
    return found;
  }

  function fillPrompts(wanted) {
    const found = chosenPrompts();
    fill(prompt, found.map(([index, sum]) => {
      const one = data.answers[index];
      const cost = sum === null ? "" : sum.toFixed(1).padStart(5, "\u2007") + "\u2002";
      return ["=" + one.id, `${cost}${one.id} \u00b7 ${one.category}`];
    }), wanted);
    const known = found.some(([, sum]) => sum !== null) ? ", each with its regret" : "";
    byId("count").textContent = `Prompts (${found.length} of ${data.answers.length})${known}`;
  }

  // ---- one answer ----

  function showAnswer(wantedRound = -1) {
    const index = prompt.value === "" ? -1 : data.answers.findIndex((one) => "=" + one.id === prompt.value);
    const chosen = data.answers[index];
    rounds = chosen ? byPolicy[index].get(policy.value.slice(1)) : [];
    byId("prompt-text").textContent = chosen ? visible(chosen.prompt) : "No prompt passes all filters.";
    answer.replaceChildren(...rounds.map(roundBox));
    current = null;
    showTotals();
    byId("details").replaceChildren();
    if (!rounds.length) return;
    const kept = rounds[wantedRound] && isLookedFor(rounds[wantedRound]);
    const first = Math.max(0, rounds.findIndex(isLookedFor));
    choose(answer.children[kept ? wantedRound : first]);
  }

  function roundBox(round, index) {
    const [arm, paint] = data.arms[round[1]];
    const box = element("span", "", `round paint-${paint}`);
    box.append(...pieces(round[0]));
    box.classList.toggle("gained", value(round, "accepted") > 0);
    box.classList.toggle("dim", !isLookedFor(round));
    box.dataset.index = index;
    box.tabIndex = -1;
    box.setAttribute("role", "option");
    box.setAttribute("aria-selected", "false");
    box.setAttribute("aria-label", `${visible(round[0])} (${arm}, accepted ${value(round, "accepted")} of ${value(round, "drafted")})`);
    return box;
  }

  // Line ends and empty rounds get a sign, or there would be nothing to point at.
  function pieces(text) {
    if (text === "") return [sign("\u25e6")];
    return text.split(/(\n)/).flatMap((part) => (part === "\n" ? [sign("\u21b5"), "\n"] : [visible(part)]));
  }

  function sign(character) {
    const made = element("span", "", "sign");
    made.dataset.sign = character;
    return made;
  }

  function showTotals() {
    const decoded = rounds.filter((round) => !isStart(round));
    const tokens = rounds.reduce((sum, round) => sum + (value(round, "committed") || 0), 0);
    const switches = decoded.filter((round, i) => i > 0 && round[1] !== decoded[i - 1][1]).length;
    const told = [`${tokens} tokens`, `${decoded.length} rounds`, `${switches} switches of arm`];
    if (looksForRounds()) told.push(`${rounds.filter(isLookedFor).length} rounds looked for`);
    byId("totals").textContent = rounds.length ? told.join(", ") : "";
    const counts = data.arms.map(([name, paint], arm) => [name, paint, rounds.filter((round) => round[1] === arm).length]);
    byId("legend").replaceChildren(...counts.filter(([, , count]) => count).map(([name, paint, count]) => {
      const item = element("li");
      item.append(element("span", name, `sample paint-${paint}`), ` ${count}`);
      return item;
    }));
  }

  // ---- one round ----

  function choose(box) {
    if (current) {
      current.setAttribute("aria-selected", "false");
      current.tabIndex = -1;
    }
    current = box;
    place = Number(box.dataset.index);
    box.setAttribute("aria-selected", "true");
    box.tabIndex = 0;
    show(box);
  }

  function show(box) {
    for (const other of answer.querySelectorAll(".shown")) other.classList.remove("shown");
    box.classList.add("shown");
    const index = Number(box.dataset.index);
    byId("details").replaceChildren(...facts(rounds[index], index).flatMap(([title, told, className]) => [
      element("dt", title), element("dd", told ?? "\u2013", className ?? ""),
    ]));
  }

  const number = (found, digits) => (typeof found === "number" ? found.toFixed(digits) : null);

  function facts(round, index) {
    const get = (field) => value(round, field);
    const [price, ms] = [get("price"), get("ms")];
    const priced = typeof price === "number" && typeof ms === "number";
    return [
      ["Round", `${index} of ${rounds.length - 1}`],
      ["Arm", armOf(round)],
      ["Drafts", drawn(get("drafted"), get("accepted")), get("drafted") > 0 ? "slots-drawn" : ""],
      ["Drafted", get("drafted")],
      ["Accepted", get("accepted")],
      ["Committed", get("committed")],
      ["Expected", number(get("expected"), 2)],
      ["Time, ms", number(ms, 1)],
      ["Price, tokens", priced ? (price * ms / 1000).toFixed(2) : null],
      ["Lag", get("lag")],
      ["Context", get("context")],
      ["Kind of text", get("kind") || null],
      ["Regret, tokens", number(get("regret"), 2)],
      ["Best arm", get("best_arm")],
      ["Reason", get("reason") || null, "long"],
    ];
  }

  // A dot for each draft, full when accepted
  function drawn(drafted, accepted) {
    if (!(drafted > 0)) return "none";
    if (drafted > 24) return `${accepted} of ${drafted}`;
    return "\u25cf".repeat(accepted) + "\u25cb".repeat(Math.max(0, drafted - accepted));
  }

  // ---- moving ----

  function move(event) {
    const to = target(event.key);
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (to !== null) answer.children[to].focus();
  }

  function target(key) {
    const last = rounds.length - 1;
    if (last < 0) return undefined;
    const near = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: last }[key];
    if (near !== undefined) return Math.min(Math.max(near, 0), last);
    const step = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (step === undefined) return undefined;
    for (let to = place + step; to >= 0 && to <= last; to += step) if (isLookedFor(rounds[to])) return to;
    return null;
  }

  function onBox(act) {
    return (event) => {
      const box = event.target.closest(".round");
      if (box) act(box);
    };
  }

  function settle(box) {
    choose(box);
    keepPlace();
  }

  // ---- the place, in the address ----

  function keepPlace() {
    clearTimeout(timer); // browsers allow few changes of the address a second
    timer = setTimeout(() => history.replaceState(null, "", "#" + address()), 200);
  }

  function address() {
    const told = new URLSearchParams();
    for (const name of controls) {
      const chosen = byId(name).value.replace(/^=/, "");
      if (chosen !== "" && !(name === "regret" && chosen === "0")) told.set(name, chosen);
    }
    told.set("round", place);
    return told.toString();
  }

  function readAddress() {
    const told = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    for (const name of ["policy", "category", "kind", "prompt"]) {
      if (told[name] !== undefined) told[name] = "=" + told[name];
    }
    return told;
  }

  function restore() {
    const wanted = readAddress();
    fillChoices(wanted);
    fillPrompts(wanted.prompt);
    showAnswer(Number.parseInt(wanted.round, 10));
    return wanted;
  }

  function filter(event) {
    const kept = event.target === sort ? undefined : prompt.value;
    fillPrompts(kept);
    showAnswer(prompt.value === kept ? place : -1);
    keepPlace();
  }

  for (const control of [policy, category, kind, regret, sort]) control.addEventListener("change", filter);
  search.addEventListener("input", filter);
  prompt.addEventListener("change", () => { showAnswer(); keepPlace(); });
  answer.addEventListener("keydown", move);
  answer.addEventListener("mouseover", onBox(show));
  answer.addEventListener("mouseleave", () => { if (current) show(current); });
  answer.addEventListener("click", onBox(settle));
  answer.addEventListener("focusin", onBox((box) => { if (box !== current) settle(box); }));
  addEventListener("hashchange", restore);
  if (restore().prompt !== undefined) byId("viewer-title").scrollIntoView();
})();
