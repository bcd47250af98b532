// Scrolling: a view at the end of the conversation stays there, whatever grows.
const Scroll = (() => {
  const byId = (id) => document.getElementById(id);
  const scroller = byId("scroller");
  let isFollowing = true;
  let lastTop = 0;
  const gap = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  const isAtEnd = () => gap() < 40;

  function follow(isWanted) {
    isFollowing = isWanted;
    // The browser's scroll anchoring would look like scrolling by the user.
    scroller.style.overflowAnchor = isWanted ? "none" : "auto";
  }

  function toEnd() {
    follow(true);
    scroller.scrollTop = scroller.scrollHeight;
    lastTop = scroller.scrollTop;
  }

  scroller.addEventListener("scroll", () => {
    // The event comes after the scrolling. Text that has grown in between does not mean that the user scrolled away.
    const isUp = scroller.scrollTop < lastTop;
    lastTop = scroller.scrollTop;
    if (isUp) follow(gap() < 2);
    else if (isAtEnd()) follow(true);
    byId("to-end").hidden = isAtEnd();
  }, { passive: true });
  const growth = new ResizeObserver(() => {
    if (isFollowing) toEnd();
    byId("to-end").hidden = isAtEnd();
  });
  growth.observe(byId("log"));
  growth.observe(scroller);
  byId("to-end").addEventListener("click", () => {
    toEnd();
    Composer.focus();
  });

  return { toEnd };
})();
