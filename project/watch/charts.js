const [width, height, left, right, top_, bottom] = [560, 230, 62, 548, 10, 196];
const short = value => Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-4)
  ? value.toExponential(2)
  : value.toLocaleString('en', Math.abs(value) >= 1000 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 4});
const add = (parent, name, attributes = {}, text = '') => {
  const space = parent.namespaceURI.endsWith('svg') || name === 'svg' ? 'http://www.w3.org/2000/svg' : parent.namespaceURI;
  const node = parent.appendChild(document.createElementNS(space, name));
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(text);
  return node;
};
const axis = (values, start, end, wanted) => {
  let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.length) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 20, high + (Math.abs(high) || 1) / 20];
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough)), ticks = [];
  const step = power * [1, 2, 5, 10].find(each => power * each >= rough);
  const first = Math.ceil(low / step - 1e-9);  // beyond 2^53 a sum of 1 is lost
  for (let k = 0; k < 20 && first + k <= high / step + 1e-9; k++) ticks.push((first + k) * step || 0);
  return {ticks, has: value => low <= value && value <= high, at: value => start + (end - start) * (value - low) / (high - low),
          value: place => low + (place - start) / (end - start) * (high - low)};
};
for (const figure of document.querySelectorAll('figure')) {
  const {lines, marks, x_name, from_zero} = JSON.parse(figure.dataset.chart);
  const points = lines.flatMap(line => line.points), finite = point => typeof point[1] === 'number';
  const x = axis(points.map(point => point[0]), left, right, 6);
  const y = axis([...points.filter(finite).map(point => point[1]), ...(from_zero ? [0] : [])], bottom, top_, 5);
  const svg = add(figure, 'svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': figure.textContent});
  for (const tick of y.ticks) {
    add(svg, 'line', {class: 'grid', x1: left, x2: right, y1: y.at(tick), y2: y.at(tick)});
    add(svg, 'text', {x: left - 6, y: y.at(tick) + 4, 'text-anchor': 'end'}, short(tick));
  }
  for (const tick of x.ticks) add(svg, 'text', {x: x.at(tick), y: bottom + 16, 'text-anchor': 'middle'}, short(tick));
  add(svg, 'text', {x: right, y: height - 4, 'text-anchor': 'end'}, x_name);
  for (const [place, text, kind] of marks.filter(mark => x.has(mark[0])))
    add(add(svg, 'line', {class: kind, x1: x.at(place), x2: x.at(place), y1: top_, y2: bottom}), 'title', {}, text);
  const legend = add(figure, 'div', {class: 'legend'}), reading = add(figure, 'div', {class: 'reading'});
  for (const {name, colour, points} of lines) {
    const path = points.map((point, at) => !finite(point) ? ''
      : `${at && finite(points[at - 1]) ? 'L' : 'M'}${x.at(point[0])} ${y.at(point[1])}`).join('');  // broken where one is not finite
    add(svg, 'path', {fill: 'none', stroke: colour, 'stroke-width': 1.8, d: path});
    for (const point of points)
      if (!finite(point)) add(svg, 'text', {class: 'nan', x: x.at(point[0]), y: top_ + 8, 'text-anchor': 'middle'}, '\u00d7');
      else if (points.length < 30) add(svg, 'circle', {cx: x.at(point[0]), cy: y.at(point[1]), r: 2, fill: colour});
    add(add(legend, 'span'), 'i', {style: `background:${colour}`}).after(name);
  }
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), here = x.value((event.clientX - box.left) / box.width * width);
    reading.textContent = lines.filter(line => line.points.length).map(line => {
      const near = line.points.reduce((a, b) => Math.abs(b[0] - here) < Math.abs(a[0] - here) ? b : a);
      return `${line.name}: ${finite(near) ? +near[1].toPrecision(5) : near[1]} at ${+near[0].toPrecision(6)}`;
    }).join('   ') + `  (${x_name})`;
  });
  svg.addEventListener('mouseleave', () => reading.textContent = '');
}
