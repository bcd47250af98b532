// Messages of the page: for screen readers, and in a line above the input.
const News = (() => {
  const { element } = Markdown;
  const byId = (id) => document.getElementById(id);

  /** For screen readers. */
  function announce(text) {
    byId("news").textContent = text;
  }

  let offerEnd = 0;
  const hide = () => (byId("toast").hidden = true);

  /** Shows a line with one button for some time. */
  function offer(text, name = "", onClick = () => {}) {
    const action = element("button", "quiet", name);
    action.type = "button";
    action.addEventListener("click", () => {
      hide();
      onClick();
    });
    byId("toast").replaceChildren(element("span", "", text), ...(name ? [action] : []));
    byId("toast").hidden = false;
    clearTimeout(offerEnd);
    offerEnd = setTimeout(hide, 10_000);
  }

  async function copyText(text, source) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Over plain HTTP from another machine, the clipboard API does not exist.
      const area = element("textarea", "hidden");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      source.focus();
    }
    const before = source.textContent;
    source.textContent = "Copied";
    announce("Copied.");
    setTimeout(() => (source.textContent = before), 1200);
  }

  return { copyText, hide, offer, announce };
})();
