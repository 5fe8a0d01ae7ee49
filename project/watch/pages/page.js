'use strict';
// One x-range, in all charts; what is shown of it is `zoom`, or all of it.
const page = JSON.parse(document.body.dataset.page), height = 230;
const charts = [...document.querySelectorAll('figure[data-chart]')].map(figure =>
  ({figure, place: figure.querySelector('.plot'), reading: figure.querySelector('.reading'), ...JSON.parse(figure.dataset.chart)}));
const several = document.querySelector('table.runs[class~=sortable]') !== null, off = new Set();
let axis = 0, zoom = null, folded = [];

const short = (value, digits = 4) => value == null ? '' : Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-4)
  ? value.toExponential(Math.max(2, digits - 1)).replace(/\.?0*e\+?/, 'e')
  : value.toLocaleString('en', {maximumSignificantDigits: Math.max(digits, Math.floor(Math.log10(Math.abs(value) || 1)) + 1)});
// The labels of an axis, with as many digits as tell neighbours apart.
const labels = (_, all) => {
  const apart = Math.abs(all[1] - all[0]) / Math.max(...all.map(Math.abs));
  return all.map(value => short(value, Math.min(17, Math.max(4, Math.ceil(1 - Math.log10(apart || 1))))));
};
const when = seconds => new Date(1000 * seconds).toLocaleString('sv');  // as everywhere on the page: 2026-01-31 23:59:00
const times = (_, all, at, space, apart) => {
  const [from, to] = apart >= 86400 ? [0, 10] : all.at(-1) - all[0] >= 86400 ? [8, 16] : [11, apart < 60 ? 19 : 16];
  return all.map(seconds => when(seconds).slice(from, to));
};
const named = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ranges = page.axes.map((_, at) => {
  let low = Infinity, high = -Infinity;
  const places = [...charts.flatMap(chart => chart.lines.map(line => line.x[at])), page.marks.map(([x]) => x[at]), page.axes[at].ends ?? []];
  for (const list of places) for (const x of list) [low, high] = [Math.min(low, x), Math.max(high, x)];
  return low < high ? [low, high] : low === high ? [low - 1, high + 1] : [0, 1];
});
const view = () => zoom ?? ranges[axis];

function show(next) {
  const [low, high] = ranges[axis];
  if (next) {
    const width = Math.min(Math.max(next[1] - next[0], (high - low) / 1e4), high - low);
    const start = Math.min(Math.max(next[0], low), high - width);
    next = width > 0.999 * (high - low) ? null : [start, start + width];
  }
  zoom = next;
  const [min, max] = view();
  for (const {plot} of charts) plot?.setScale('x', {min, max});
  for (const button of document.querySelectorAll('[data-zoom="0"]')) button.disabled = !zoom;
}

function scale(factor, centre) {
  const [low, high] = view();
  centre ??= (low + high) / 2;
  show([centre - (centre - low) * factor, centre + (high - centre) * factor]);
}

// A mark is drawn in every chart, whatever its own points are; what is not finite is a cross at the top.
function drawMarks(plot, odd) {
  const {ctx, bbox} = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - ratio, bbox.top, bbox.width + 2 * ratio, bbox.height);
  ctx.clip();
  for (const [x, , kind] of page.marks) {
    const at = plot.valToPos(x[axis], 'x', true), fault = kind === 'fault';
    ctx.strokeStyle = named(fault ? '--fault' : '--soft');
    ctx.lineWidth = (fault ? 2 : 1) * ratio;
    ctx.setLineDash(fault ? [] : [4 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.fillStyle = named('--fault');
  ctx.font = `bold ${14 * ratio}px system-ui`;
  ctx.textAlign = 'center';
  for (const {x} of odd) ctx.fillText('\u00d7', plot.valToPos(x, 'x', true), bbox.top + 12 * ratio);
  ctx.restore();
}

function read(chart) {
  const {plot, lines, odd, reading, focus} = chart, {left, idxs} = plot.cursor;
  if (left == null || left < 0) return reading.textContent = '';
  const near = x => Math.abs(plot.valToPos(x, 'x') - left) < 6, place = x => page.axes[axis].time ? when(x) : short(x);
  const values = lines.flatMap(({name}, at) => {
    const here = idxs[at + 1], y = here == null ? null : plot.data[at + 1][here];
    return y == null || off.has(at) || (several && focus !== at + 1) ? [] : [`${name}: ${short(y)} at ${place(plot.data[0][here])}`];
  });
  values.push(...odd.filter(({x}) => near(x)).map(({x, name, value}) => `${name}: ${value} at ${place(x)}`));
  values.push(...page.marks.filter(([x]) => near(x[axis])).map(([, text]) => text));
  reading.textContent = values.length ? `${values.join('   ')}  (${page.axes[axis].name})` : '';
}

// An axis is as wide as its longest label; most are equally wide, so that charts below each other are aligned.
function room(plot, values, at, cycle) {
  const {_size, ticks, gap, font} = plot.axes[at];
  if (cycle > 2) return _size;
  plot.ctx.font = font[0];
  const widest = Math.max(0, ...(values ?? []).map(text => plot.ctx.measureText(text).width));
  return Math.max(56, Math.ceil(ticks.size + gap + widest / devicePixelRatio) + 2);
}

// Of a logarithmic scale a handful of lines, at powers of ten, and between these where there are few.
function decades(plot, at, low, high) {
  const [first, last] = [low, high].map(Math.log10), step = Math.ceil((last - first) / 7) || 1, splits = [];
  for (let power = Math.floor(first / step) * step; power <= last; power += step)
    for (const part of last - first < 2.5 ? [1, 2, 5] : [1]) splits.push(part * 10 ** power);
  return splits.filter(value => value >= low * 0.999 && value <= high * 1.001);
}

function draw(chart) {
  chart.plot?.destroy();
  chart.plot = null;
  const {place, lines, from_zero, log} = chart, printed = document.documentElement.classList.contains('printed');
  const width = place.clientWidth && printed ? 430 : place.clientWidth;  // on paper shrunk a little, whatever the screen was
  if (!width) return;  // folded away
  chart.odd = lines.flatMap(({name, x, y}) => y.flatMap((value, at) => typeof value === 'string' ? [{name, value, x: x[axis][at]}] : []));
  const usable = value => typeof value === 'number' && !(log && value <= 0);
  const data = uPlot.join(lines.map(({x, y}) => [x[axis], y.map(value => usable(value) ? value : null)]));
  const line = {stroke: () => named('--soft'), grid: {stroke: () => named('--grid'), width: 1}, ticks: {stroke: () => named('--grid'), width: 1}, font: '11px system-ui'};
  const range = (_, low, high) => low == null ? [log ? 0.1 : 0, 1]
    : log ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(from_zero ? Math.min(0, low) : low, high, 0.1, true);
  chart.plot = new uPlot({
    width, height, legend: {show: false}, focus: {alpha: 0.2},
    series: [{}, ...lines.map(({name, colour}, at) => ({label: name, stroke: colour, width: 1.8, show: !off.has(at), points: {size: 4, fill: colour}}))],
    scales: {x: {time: Boolean(page.axes[axis].time), range: () => view()}, y: {distr: log ? 3 : 1, range}},
    axes: [
      {...line, size: 28, space: 64, label: page.axes[axis].name, labelSize: 16, labelFont: '11px system-ui', values: page.axes[axis].time ? times : labels},
      {...line, size: room, ...(log ? {splits: decades, filter: (_, splits) => splits} : {}), values: labels},
    ],
    cursor: {
      drag: {x: true, y: false, setScale: false}, sync: {key: 'x', setSeries: several}, hover: {skip: [undefined, null]},
      points: {size: 6}, focus: {prox: several ? 40 : -1}, bind: {dblclick: () => () => show(null)},
    },
    hooks: {
      draw: [plot => drawMarks(plot, chart.odd)],
      setCursor: [plot => chart.plot && read(chart)],
      setSeries: [(plot, at, {focus}) => { if (focus !== undefined) chart.focus = focus ? at : null; }],
      setSelect: [plot => {
        const {left, width} = plot.select;
        if (width < 4) return;
        show([plot.posToVal(left, 'x'), plot.posToVal(left + width, 'x')]);
        plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
      }],
    },
  }, data, place);
  listenToTouch(chart.plot);
}

// One finger moves what is shown, and two zoom: what they touch stays under them. Up and down scrolls the page.
function listenToTouch(plot) {
  const fingers = new Map();
  const share = clientX => { const box = plot.over.getBoundingClientRect(); return (clientX - box.left) / box.width; };
  plot.over.addEventListener('pointerdown', event => {
    if (event.pointerType !== 'touch') return;
    const [low, high] = view(), at = share(event.clientX);
    for (const [id, finger] of fingers) fingers.set(id, {at: finger.at, x: low + finger.at * (high - low)});
    fingers.set(event.pointerId, {at, x: low + at * (high - low)});
  });
  plot.over.addEventListener('pointermove', event => {
    const finger = fingers.get(event.pointerId);
    if (!finger) return;
    finger.at = share(event.clientX);
    const [a, b] = [...fingers.values()], [low, high] = view();
    if (!b && !zoom) return;
    const width = b && Math.abs(b.at - a.at) > 0.02 ? (b.x - a.x) / (b.at - a.at) : high - low;
    if (width > 0) show([a.x - a.at * width, a.x - a.at * width + width]);
  });
  for (const name of ['pointerup', 'pointercancel']) plot.over.addEventListener(name, event => fingers.delete(event.pointerId));
}

function listenToKeys(chart) {
  chart.place.addEventListener('blur', () => chart.plot?.setCursor({left: -10, top: -10}));
  chart.place.addEventListener('keydown', event => {
    const {plot} = chart, [low, high] = view(), way = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const here = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, 'x') : undefined;
    if (way && event.shiftKey) show([low + way * (high - low) / 4, high + way * (high - low) / 4]);
    else if (way) {
      const xs = plot.data[0].filter(x => low <= x && x <= high);
      const next = here === undefined ? xs.at(way > 0 ? 0 : -1) : way > 0 ? xs.find(x => x > here + 1e-9 * (high - low)) : xs.findLast(x => x < here - 1e-9 * (high - low));
      if (next !== undefined) plot.setCursor({left: plot.valToPos(next, 'x'), top: plot.over.clientHeight / 2});
    } else if (event.key === '+' || event.key === '=') scale(0.5, here);
    else if (event.key === '-') scale(2, here);
    else if (event.key === '0' || event.key === 'Escape') show(null);
    else return;
    event.preventDefault();
  });
}

function drawAll() {
  charts.forEach(draw);
}

for (const chart of charts) {
  listenToKeys(chart);
  const button = chart.figure.querySelector('button.log');
  button.hidden = !chart.lines.some(({y}) => y.some(value => value > 0));
  button.addEventListener('click', () => {
    chart.log = !chart.log;
    button.setAttribute('aria-pressed', chart.log);
    draw(chart);
  });
  new ResizeObserver(() => {
    const width = chart.place.clientWidth;
    if (!chart.plot) draw(chart);
    else if (width && width !== chart.plot.width) chart.plot.setSize({width, height});
  }).observe(chart.place);
}
for (const form of document.querySelectorAll('.tools')) {
  form.hidden = false;
  form.addEventListener('change', () => {
    axis = Number(form.elements.axis.value);
    show(null);
    drawAll();
  });
  for (const button of form.querySelectorAll('[data-zoom]'))
    button.addEventListener('click', () => Number(button.dataset.zoom) ? scale(Number(button.dataset.zoom)) : show(null));
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
for (const [name, printed] of [['beforeprint', true], ['afterprint', false]])
  addEventListener(name, () => {
    document.documentElement.classList.toggle('printed', printed);
    if (printed) folded = document.querySelectorAll('details:is(.differences,.marks,.facts *):not([open])');
    for (const part of folded) part.open = printed;  // on paper nothing can be unfolded
    drawAll();
  });

// Tables: a heading sorts; a run is hidden by its box, and stands out in all charts while it is pointed at.
for (const heading of document.querySelectorAll('.sortable thead th')) {
  const button = document.createElement('button');
  button.type = 'button';
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener('click', () => {
    const now = heading.getAttribute('aria-sort');  // of a metric the best comes first
    const down = now ? now === 'ascending' : heading.dataset.better === 'max', body = heading.closest('table').tBodies[0];
    const key = row => row.cells[heading.cellIndex].dataset.value;
    for (const other of heading.parentNode.cells) other.removeAttribute('aria-sort');
    heading.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const order = (a, b) => key(a) === '' || key(b) === '' ? (key(a) === '') - (key(b) === '')  // what is not known comes last
      : (down ? -1 : 1) * (isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b), 'en', {numeric: true}) : key(a) - key(b));
    body.append(...[...body.rows].sort(order));
  });
}
const paths = [...document.querySelectorAll('.parallel path')];
// A hidden run stands out nowhere, or all the others would fade for nothing; nor does one that a finger has left.
function pointAt(run) {
  const known = run !== null && !off.has(run);
  for (const {plot} of charts) plot?.setSeries(known ? run + 1 : null, {focus: true});
  paths.forEach((path, at) => path.classList.toggle('focused', known && at === run));
  paths[0]?.closest('svg').classList.toggle('some', known);
}
for (const place of document.querySelectorAll('tr[data-run],.runs-legend [data-run]')) {
  const run = Number(place.dataset.run);
  place.querySelector('input')?.addEventListener('change', event => {
    const hidden = !event.target.checked;
    off[hidden ? 'add' : 'delete'](run);
    pointAt(null);
    for (const {plot} of charts) plot?.setSeries(run + 1, {show: !hidden});
    for (const other of [paths[run], document.querySelector(`.runs-legend [data-run="${run}"]`)]) other?.classList.toggle('off', hidden);
  });
  place.addEventListener('pointerenter', event => event.pointerType === 'mouse' && pointAt(run));
  place.addEventListener('pointerleave', () => pointAt(null));
}
