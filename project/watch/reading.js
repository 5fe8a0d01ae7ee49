for (const f of document.querySelectorAll('figure')) {
  const c = JSON.parse(f.dataset.chart), svg = f.querySelector('svg'), out = f.querySelector('.reading');
  svg.addEventListener('mousemove', e => {
    const box = svg.getBoundingClientRect(), [low, high, left, right] = c.x;
    const px = (e.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const x = low + (px - left) / (right - left) * (high - low);
    out.textContent = c.lines.filter(l => l.points.length).map(l => {
      const p = l.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return `${l.name}: ${typeof p[1] === 'number' ? +p[1].toPrecision(5) : p[1]} at ${+p[0].toPrecision(6)}`;
    }).join('   ') + `  (${c.name})`;
  });
  svg.addEventListener('mouseleave', () => out.textContent = '');
}
