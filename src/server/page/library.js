// All conversations of this browser: in memory, in its database, and the same in every tab.
const Library = (() => {
  const STORE = "conversations";
  /** Conversations by their ids. */
  const all = new Map();
  /** Null if the browser gives us none. Then conversations last as long as the tab. */
  let database = null;
  /** Resolves when the database is open, or known to be unavailable. */
  let opening = null;
  let isKeeping = true;
  const tabs = new BroadcastChannel("tinyvllm");

  /** The result of a database request, as a promise. */
  const result = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

  /** Reads the stored conversations. */
  async function open() {
    opening = openDatabase();
    await opening;
    // An earlier version of the page stored a single conversation elsewhere.
    const early = Conversation.read(Kept.storedJson("conversation"));
    if (early) await save(early);
    Kept.put("localStorage", "conversation", null);
  }

  async function openDatabase() {
    try {
      const request = indexedDB.open("tinyvllm", 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      database = await result(request);
      // A tab with a newer version of the page wants to upgrade the database.
      database.onversionchange = () => database.close();
      for (const record of await result(database.transaction(STORE).objectStore(STORE).getAll())) take(record);
    } catch {
      self.onTrouble("This browser keeps no conversations of this page. They last until the tab is closed.");
    }
  }

  function take(record) {
    const conversation = Conversation.read(record);
    if (conversation?.id !== record.id) return;
    const known = all.get(record.id);
    if (known) known.become(conversation);
    else all.set(record.id, conversation);
  }

  /** Runs a change of the store, and notifies the other tabs. */
  async function change(id, action) {
    await opening;
    if (!database) return;
    try {
      const transaction = database.transaction(STORE, "readwrite");
      const done = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      await Promise.all([action(transaction.objectStore(STORE)), done]);
      tabs.postMessage({ changed: id });
    } catch {
      self.onTrouble("The browser did not keep this conversation: its store may be full. Export it, or delete others.");
    }
  }

  /** Stores a conversation, merged with what another tab has added to it. */
  function save(conversation) {
    all.set(conversation.id, conversation);
    if (!isKeeping) return Promise.resolve();
    return change(conversation.id, async (store) => {
      const kept = Conversation.read(await result(store.get(conversation.id)));
      if (kept) conversation.merge(kept);
      store.put(conversation.toRecord());
    });
  }

  /** Stores a conversation without merging. */
  function replace(conversation) {
    all.set(conversation.id, conversation);
    if (!isKeeping) return Promise.resolve();
    return change(conversation.id, (store) => store.put(conversation.toRecord()));
  }

  function remove(id) {
    all.delete(id);
    return change(id, (store) => store.delete(id));
  }

  function removeAll() {
    all.clear();
    return change(null, (store) => store.clear());
  }

  tabs.onmessage = async ({ data }) => {
    if (data?.changed === undefined) return self.onMessage(data);
    if (!database) return;
    const id = data.changed;
    try {
      const record = id === null ? null : await result(database.transaction(STORE).objectStore(STORE).get(id));
      if (id === null) all.clear();
      else if (!record) all.delete(id);
      else if (!self.isOurs(id)) take(record);
      self.onChange(id);
    } catch {}
  };

  /** All conversations, latest first; with words, only those that contain all of them. */
  function list(words = "") {
    const wanted = words.toLowerCase().split(/\s+/).filter((word) => word !== "");
    const found = [...all.values()].filter((conversation) => wanted.length === 0 || conversation.matches(wanted));
    return found.sort((one, other) => other.updated - one.updated);
  }

  // ---- Files

  const exportAll = () => JSON.stringify({ conversations: list().map((each) => each.toRecord()) }, null, 1);
  const exportOne = (conversation) => JSON.stringify(conversation.toRecord(), null, 1);

  /** Adds the conversations in a file. Returns the new ones. */
  async function importFile(name, text) {
    const added = [];
    for (const conversation of Imports.parse(name, text)) {
      const known = all.get(conversation.id);
      if (known && exportOne(known) === exportOne(conversation)) continue;
      if (known) conversation.id = newId();
      await save(conversation);
      added.push(conversation);
    }
    return added;
  }

  const self = {
    all,
    exportAll,
    exportOne,
    importFile,
    list,
    open,
    remove,
    removeAll,
    replace,
    save,
    /** Sends a message to the other tabs. */
    notify: (message) => tabs.postMessage(message),
    /** Sets whether conversations are stored from now on. */
    keep: (isWanted) => (isKeeping = isWanted),
    /** Called with a conversation's id when another tab changed it, or with null if all are deleted. */
    onChange: () => {},
    /** Called with a message of another tab. */
    onMessage: () => {},
    /** Whether this tab is adding to a conversation. Then a stored state is not newer. */
    isOurs: () => false,
    /** Called with the reason why something is not stored. */
    onTrouble: () => {},
  };
  return self;
})();
