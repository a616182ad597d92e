// Small SVG charts.

import type { RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { number } from "./format";

export interface Curve {
  name: string;
  points: [number, number][];
  band?: [number, number][];
  dots?: boolean;
}

const LEFT = 54;
const BOTTOM = 22;
const TOP = 8;
const RIGHT = 8;

function useWidth(): [RefObject<HTMLElement | null>, number] {
  const ref = useRef<HTMLElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (!ref.current) return;
    const observer = new ResizeObserver(([entry]) => entry && setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

/** Round values between `low` and `high` for the lines of a grid. */
export function ticks(low: number, high: number, wanted = 4): number[] {
  const step = 10 ** Math.floor(Math.log10((high - low) / wanted || 1));
  const factor = [1, 2, 5, 10].find((one) => (high - low) / (one * step) <= wanted + 0.5) ?? 10;
  const size = factor * step;
  const found: number[] = [];
  for (let at = Math.ceil(low / size - 1e-9) * size; at <= high + size * 1e-9; at += size)
    found.push(Number(at.toPrecision(12)));
  return found;
}

interface ChartProps {
  title: string;
  curves: Curve[];
  xLabel?: string;
  height?: number;
  format?: (value: number) => string;
  zero?: boolean;
  empty?: string;
}

export function LineChart(props: ChartProps) {
  const { title, curves, xLabel = "", height = 170, format = number, zero = false, empty = "no data yet" } = props;
  const [ref, width] = useWidth();
  const [at, setAt] = useState<number | null>(null);
  const shown = curves.filter((curve) => curve.points.length);
  const xs = shown.flatMap((curve) => curve.points.map(([x]) => x));
  const ys = shown.flatMap((curve) => [...curve.points.map(([, y]) => y), ...(curve.band ?? []).flat()]);
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [zero ? Math.min(0, ...ys) : Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) / 10, y1 + (Math.abs(y1) || 1) / 10];
  const px = (x: number) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const py = (y: number) => TOP + (1 - (y - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
  const move = (event: MouseEvent) => {
    const box = (event.currentTarget as SVGElement).getBoundingClientRect();
    setAt(x0 + ((event.clientX - box.left - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0));
  };
  const nearest = (curve: Curve) =>
    at === null
      ? curve.points[curve.points.length - 1]
      : curve.points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
  const last = shown.map((curve) => `${curve.name} ${format(curve.points[curve.points.length - 1]?.[1] ?? 0)}`);
  return (
    <figure class="chart" ref={ref}>
      <figcaption>{title}</figcaption>
      {width > 0 && shown.length > 0 && (
        <svg
          width={width}
          height={height}
          role="img"
          aria-label={`${title}. Last values: ${last.join(", ")}`}
          onMouseMove={move}
          onMouseLeave={() => setAt(null)}
        >
          {ticks(y0, y1).map((y) => (
            <g key={y}>
              <line class="grid" x1={LEFT} x2={width - RIGHT} y1={py(y)} y2={py(y)} />
              <text class="tick" x={LEFT - 6} y={py(y) + 4} text-anchor="end">
                {format(y)}
              </text>
            </g>
          ))}
          {ticks(x0, x1, 6).map((x) => (
            <text key={x} class="tick" x={px(x)} y={height - 6} text-anchor="middle">
              {number(x)}
            </text>
          ))}
          {shown.map((curve, index) => (
            <g key={curve.name} class={`curve-${index % 8}`}>
              {curve.band && (
                <path
                  class="band"
                  d={`M${[
                    ...curve.points.map(([x], one) => `${px(x)},${py(curve.band?.[one]?.[1] ?? 0)}`),
                    ...curve.points.map(([x], one) => `${px(x)},${py(curve.band?.[one]?.[0] ?? 0)}`).reverse(),
                  ].join("L")}Z`}
                />
              )}
              {curve.dots || curve.points.length === 1 ? (
                curve.points.map(([x, y]) => <circle key={x} cx={px(x)} cy={py(y)} r={2} />)
              ) : (
                <path class="line" d={`M${curve.points.map(([x, y]) => `${px(x)},${py(y)}`).join("L")}`} />
              )}
            </g>
          ))}
          {at !== null && at >= x0 && at <= x1 && (
            <line class="cursor" x1={px(at)} x2={px(at)} y1={TOP} y2={height - BOTTOM} />
          )}
        </svg>
      )}
      {!shown.length && <p class="quiet">{empty}</p>}
      <ul class="legend">
        {shown.map((curve, index) => (
          <li key={curve.name} class={`curve-${index % 8}`}>
            <span class="swatch" /> {curve.name} <b>{format(nearest(curve)?.[1] ?? 0)}</b>
          </li>
        ))}
        {shown.length > 0 && (
          <li class="quiet">
            {at === null ? xLabel : `${xLabel} ${number(nearest(shown[0] as Curve)?.[0] ?? 0, 4)}`}
          </li>
        )}
      </ul>
    </figure>
  );
}

export interface Bin {
  low: number;
  high: number;
  count: number;
}

export function histogram(values: ArrayLike<number> & Iterable<number>, bins = 24): Bin[] {
  if (!values.length) return [];
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const width = (high - low) / bins || 1;
  const found = Array.from({ length: low === high ? 1 : bins }, (_, at) => ({
    low: low + at * width,
    high: low + (at + 1) * width,
    count: 0,
  }));
  for (const value of values) {
    const bin = found[Math.min(Math.floor((value - low) / width), found.length - 1)];
    if (bin) bin.count += 1;
  }
  const end = found[found.length - 1];
  if (end) end.high = high;
  return found;
}

/** Histogram whose bins are buttons. */
export function Histogram(props: {
  title: string;
  bins: Bin[];
  chosen: (bin: Bin) => boolean;
  onChoose: (bin: Bin | null) => void;
}) {
  const most = Math.max(1, ...props.bins.map((bin) => bin.count));
  const any = props.bins.some((bin) => props.chosen(bin));
  return (
    <figure class="chart histogram">
      <figcaption>{props.title}</figcaption>
      <div class="bars">
        {props.bins.map((bin) => {
          const chosen = props.chosen(bin);
          const label = `${number(bin.low, 3)} to ${number(bin.high, 3)}: ${bin.count} rollouts`;
          return (
            <button
              key={bin.low}
              title={label}
              aria-label={label}
              aria-pressed={chosen}
              class={any && !chosen ? "bar faded" : "bar"}
              disabled={!bin.count}
              onClick={() => props.onChoose(chosen ? null : bin)}
            >
              <span style={{ height: `${Math.max(bin.count ? 2 : 0, (100 * bin.count) / most)}%` }} />
            </button>
          );
        })}
      </div>
      <div class="ends">
        <span>{number(props.bins[0]?.low)}</span>
        <span>{number(props.bins[props.bins.length - 1]?.high)}</span>
      </div>
    </figure>
  );
}
