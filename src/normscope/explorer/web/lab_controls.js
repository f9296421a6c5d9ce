// The controls of the lab, made from their table; a value that is not allowed is explained beside its control.
import { element } from "./dom.js";
import { CONTROLS, LOOKS, parseControl } from "./lab_settings.js";

/** A form in `host`. `onChange(key, value)` after an allowed change; `set(settings, problems)` shows values and sentences. */
export function createControls(host, { onChange }) {
  const made = new Map();
  for (const control of [...CONTROLS, ...LOOKS]) made.set(control.key, makeControl(control, onChange));
  const groups = [...new Set(CONTROLS.map(control => control.group))];
  const fieldset = (title, controls) => element("fieldset", { class: "lab-group" }, element("legend", {}, title),
    controls.map(control => made.get(control.key).box));
  const sets = groups.map(group => fieldset(group, CONTROLS.filter(control => control.group === group)));
  host.replaceChildren(...sets, fieldset("Display", LOOKS));

  return {
    set(settings, problems) {
      for (const [key, control] of made) control.set(settings, problems[key] ?? "");
    },
  };
}

function makeControl(control, onChange) {
  const { key, label, options, initial, min, max, whole } = control;
  const id = `lab-${key}`, tick = typeof initial === "boolean", plain = { id, name: key };
  const problem = element("span", { class: "problem", id: `${id}-problem`, role: "alert" });
  const input = options
    ? element("select", plain, Object.entries(options).map(([value, text]) => element("option", { value }, text)))
    : element("input", tick ? { ...plain, type: "checkbox" }
      : { ...plain, type: "number", min, max, step: whole ? 1 : "any", inputmode: "decimal" });
  input.setAttribute("aria-describedby", problem.id);
  const slider = control.slider
    && element("input", { type: "range", min, max: control.slider, step: 0.1, "aria-label": `${label}, slider` });
  const words = element("span", {}, label);
  const kind = tick ? "control line" : "control";
  const labelled = element("label", { class: kind, htmlFor: id }, ...(tick ? [input, words] : [words, input]));
  const box = element("div", { class: "lab-control" }, labelled, slider, problem);

  function explain(text) {
    problem.textContent = text;
    input.setAttribute("aria-invalid", String(Boolean(text)));
  }

  function change(given) {
    try {
      const value = parseControl(control, given);
      explain("");
      onChange(key, value);
    } catch (error) {
      explain(error.message);
    }
  }
  input.addEventListener(tick || options ? "change" : "input", () => change(tick ? input.checked : input.value));
  slider?.addEventListener("input", () => change(slider.value));

  return {
    box,
    set(settings, text) {
      const value = settings[key];
      if (tick) input.checked = value;
      // While a number is being typed, "1." or "" must stay as they are.
      else if (input !== document.activeElement || options || Number(input.value) !== value) input.value = String(value);
      if (slider && slider !== document.activeElement) slider.value = String(value);
      input.disabled = Boolean(control.when && !control.when(settings));
      explain(text);
    },
  };
}
