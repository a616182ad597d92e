// Numbers, times and durations as text.

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

export function plural(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(digits)));
}

export function percent(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return "0 s";
  if (value < 0.1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} m ${String(Math.round(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} m`;
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${Number((value / 1024 ** at).toPrecision(3))} ${units[at]}`;
}

export function time(unix: number | null | undefined): string {
  return unix ? new Date(unix * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "–";
}

export function estimate(mean: number | null | undefined, binary: boolean): string {
  return binary ? percent(mean) : number(mean, 3);
}
