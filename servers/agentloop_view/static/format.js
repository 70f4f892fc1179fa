// Numbers and times as they are shown, each with its unit. A value that is not there is a dash.

export const NONE = "–";

const shown = (format) => (value) => (value === null || value === undefined ? NONE : format(value));

export const count = shown((value) => value.toLocaleString("en"));
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const reward = shown((value) => String(Number(value.toFixed(3))));
export const share = shown((value) => `${(100 * value).toFixed(1)} %`);
export const moment = shown((at_s) => new Date(1000 * at_s).toLocaleString("sv"));
export const shortMoment = shown((at_s) => moment(at_s).slice(5, 16));
export const milliseconds = shown((value) => `${value < 100 ? value.toFixed(1) : count(Math.round(value))} ms`);
export const seconds = shown((value) => `${value < 100 ? value.toFixed(2) : count(Math.round(value))} s`);
export const mebibytes = shown((value) => `${(value / 2 ** 20).toFixed(1)} MiB`);

/** The weight versions of a record's tokens: one, or the first and the last. */
export function versions(oldest, newest) {
  return oldest === newest ? shown(String)(oldest) : `${oldest}–${newest}`;
}

/** A text on one line in which control characters can be seen; terminals' escapes do nothing here. */
export function visible(text) {
  return text.replace(/[\u0000-\u001f\u007f]/g, (one) =>
    one === "\n" ? "↵" : one === "\u007f" ? "␡" : String.fromCharCode(0x2400 + one.charCodeAt(0)),
  );
}
