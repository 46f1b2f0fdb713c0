// Of every page that the dashboard makes: asks for it again, and shows what has changed.
{
  const seconds = 3, main = document.querySelector('main'), late = document.createElement('p');
  late.className = 'late';
  late.hidden = true;
  main.before(late);
  let shown = '', old = false, was = new Date();
  const pressed = () => [...main.querySelectorAll('button[aria-pressed]')];
  function put(text) {
    const page = new DOMParser().parseFromString(text, 'text/html');
    const open = [...main.querySelectorAll('details')].map(each => each.open);
    const logarithmic = pressed().map(each => each.ariaPressed);
    const sides = [...main.querySelectorAll('.scroll')].map(each => each.scrollLeft);
    document.title = page.title;
    main.replaceChildren(...page.querySelector('main').childNodes);
    main.querySelectorAll('details').forEach((each, i) => { each.open = open[i] ?? each.open; });
    main.querySelectorAll('.scroll').forEach((each, i) => { each.scrollLeft = sides[i] ?? 0; });
    for (const script of page.querySelectorAll('body > script:not([data-live])')) {
      const again = document.createElement('script');
      again.textContent = script.textContent;
      main.after(again);
      again.remove();
    }
    pressed().forEach((each, i) => { if (each.ariaPressed !== (logarithmic[i] ?? each.ariaPressed)) each.click(); });
  }
  async function look() {
    if (document.hidden || !getSelection().isCollapsed) { old = true; return; }
    try {
      const answer = await fetch(location.href, { cache: 'no-cache' });
      if (!answer.ok) throw new Error(await answer.text());
      const tag = answer.headers.get('ETag');
      if (tag !== shown && (shown || old)) put(await answer.text());
      shown = tag;
      was = new Date();
      late.hidden = true;
    } catch (error) {
      late.textContent = `as of ${was.toLocaleTimeString()}: ${error.message}`;
      late.hidden = false;
    }
  }
  (async () => { for (;;) { await look(); await new Promise(done => setTimeout(done, seconds * 1000)); } })();
}
