// Numbers as people read them. What is no number (null, NaN, absent) is a dash, never 0.

export const NONE = "–";

export const known = (value) => typeof value === "number" && Number.isFinite(value);

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three significant digits at most, without trailing noise: 0.0123, 1.23, 12.3, 123, 1,234. */
function significant(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return grouped.format(value);
  const digits = size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  return value === 0 ? "0" : value.toFixed(digits);
}

export const count = (value) => (known(value) ? grouped.format(value) : NONE);

export const rate = (value) => (known(value) ? significant(value) : NONE);

export function seconds(value) {
  if (!known(value)) return NONE;
  if (Math.abs(value) < 0.9995) return `${significant(value * 1000)} ms`;
  return `${significant(value)} s`;
}

const BYTES = ["B", "kB", "MB", "GB", "TB"];

function scaled(value, suffix) {
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 999.5 && unit < BYTES.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${significant(size)} ${BYTES[unit]}${suffix}`;
}

export const bytes = (value) => (known(value) ? scaled(value, "") : NONE);

/** Links carry gigabytes: from 10 MB/s on the unit stays GB/s, so that rates can be compared at a glance. */
export function bandwidth(value) {
  if (!known(value)) return NONE;
  return value >= 1e7 ? `${significant(value / 1e9)} GB/s` : scaled(value, "/s");
}

export const clock = (unix) =>
  known(unix) ? new Date(unix * 1000).toLocaleTimeString("en-GB", { hour12: false }) : NONE;

export const ago = (secs) => (secs < 90 ? `${Math.round(secs)} s` : `${Math.round(secs / 60)} min`);
