// Of every chart: values under the pointer, and buttons for logarithmic axes. `path` and `ticks` draw
// as those of steps/pages/curves.py.
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.querySelector('script').textContent);
  const svg = chart.querySelector('svg'), values = chart.querySelector('output');
  const scale = axis => axis[axis.log ? 'logarithmic' : 'linear'];
  function place(axis, value) {
    if (value === null || (axis.log && value <= 0)) return NaN;
    const change = axis.log ? Math.log : Number, [low, high] = scale(axis).ends.map(change);
    const [begin, end] = axis.span;
    return begin + (end - begin) * (change(value) - low) / (high - low);
  }
  function path(curve, kind) {
    const points = name => curve.x.map((x, i) => [place(data.x, x), place(data.y, curve[name][i])]);
    const text = ([x, y]) => x.toFixed(1) + ' ' + y.toFixed(1);
    const there = ([x, y]) => isFinite(x + y);
    if (kind === 'rule') {
      return curve.x.map(x => place(data.x, x)).filter(isFinite)
        .map(at => `M${at.toFixed(1)} 8V194`).join('');
    }
    if (kind === 'band') {
      return 'M' + [...points('y'), ...points('high').reverse()].filter(there).map(text).join('L') + 'Z';
    }
    if (kind !== 'line' && kind !== 'dashed') {
      return points('y').filter(there).map(at => `M${text(at)}h0`).join('');
    }
    return points('y').map((at, i, all) =>
      there(at) ? (i && there(all[i - 1]) ? 'L' : 'M') + text(at) : '').join('');
  }
  const ticks = {
    x: (at, text) => `<path d="M${at} 8V194"/><text x="${at}" y="209">${text}</text>`,
    y: (at, text) => `<path d="M46 ${at}H392"/><text x="41" y="${at}" dy=".35em">${text}</text>`,
  };
  function draw() {
    for (const name of 'xy') {
      svg.querySelector('.' + name).innerHTML = scale(data[name]).ticks
        .map(([value, text]) => ticks[name](place(data[name], value).toFixed(1), text)).join('');
    }
    for (const each of svg.querySelectorAll('[data-curve]')) {
      each.setAttribute('d', path(data.curves[each.dataset.curve], each.classList[0]));
    }
  }
  const switches = document.createElement('span');
  switches.className = 'switches';
  chart.querySelector('.legend').append(switches);
  for (const name of 'xy') {
    const axis = data[name], button = document.createElement('button');
    if (!axis.logarithmic) continue;
    button.textContent = 'log ' + name;
    button.title = `logarithmic axis of ${axis.label}`;
    button.ariaPressed = axis.log;
    button.onclick = () => { axis.log = !axis.log; button.ariaPressed = axis.log; hide(); draw(); };
    switches.append(button);
  }
  const marks = document.createElementNS(svg.namespaceURI, 'g');
  svg.append(marks);
  const shown = value => Math.abs(value) < 1e9
    ? value.toLocaleString('en', { maximumSignificantDigits: 6 }) : value.toExponential(3);
  function line(colour, text) {
    const row = document.createElement('span'), swatch = document.createElement('i');
    if (colour) { swatch.style.setProperty('--c', colour); row.append(swatch); }
    row.append(text);
    values.append(row);
  }
  let clicked = null;
  function hide() { clicked = null; values.replaceChildren(); marks.replaceChildren(); }
  function show(event) {
    const box = svg.getBoundingClientRect(), pointer = (event.clientX - box.left) * 400 / box.width;
    const near = [];
    for (const curve of data.curves) {
      let best = null;
      curve.y.forEach((y, i) => {
        const at = place(data.x, curve.x[i]), far = Math.abs(at - pointer);
        if (far < 12 && isFinite(place(data.y, y)) && !(best && best.far <= far)) {
          best = { curve, i, y, at, far };
        }
      });
      if (best && curve.label) near.push(best);
    }
    hide();
    if (!near.length) return;
    const nearest = near.reduce((a, b) => b.far < a.far ? b : a), x = nearest.curve.x[nearest.i];
    clicked = x;
    line('', `${data.x.label} ${shown(x)}`);
    for (const { curve, i, y, at } of near) {
      const own = curve.x[i] === x ? '' : ` (${shown(curve.x[i])})`;
      const end = curve.high.length ? ` to ${shown(curve.high[i])}` : '';
      line(curve.colour, `${curve.label}${own}  ${shown(y)}${end}`);
      const mark = document.createElementNS(svg.namespaceURI, 'path');
      mark.setAttribute('class', 'dots');
      mark.style.setProperty('--c', curve.colour);
      mark.setAttribute('d', `M${at} ${place(data.y, y)}h0`);
      marks.append(mark);
    }
    values.className = pointer > 219 ? 'left' : '';
  }
  svg.onpointermove = svg.onpointerdown = show;
  svg.onpointerleave = hide;
  if (data.clicked) {
    const said = document.createElement('p'), link = document.createElement('a');
    said.className = 'soft';
    link.textContent = 'this page';
    svg.onclick = () => {
      if (!(clicked > 0)) return;
      const [command, page] = data.clicked.map(text => text.replace('STEP', clicked));
      link.href = page;
      said.replaceChildren(`${command} writes `, link);
      chart.append(said);
    };
  }
}
