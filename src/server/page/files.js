// Text files: attachments of a message, and downloads.
const Files = (() => {
  /** The text of a file of at most this many bytes. Throws if it is not valid text. */
  async function read(file, limit) {
    const [size, most] = [file.size, limit].map((count) => count.toLocaleString("en"));
    if (file.size > limit) throw new Error(`${file.name} has ${size} bytes; at most ${most} can be taken.`);
    const bytes = new Uint8Array(await file.arrayBuffer());
    const isWide = (bytes[0] === 0xff && bytes[1] === 0xfe) || (bytes[0] === 0xfe && bytes[1] === 0xff);
    const name = isWide ? (bytes[0] === 0xff ? "utf-16le" : "utf-16be") : "utf-8";
    try {
      const text = new TextDecoder(name, { fatal: true }).decode(bytes);
      if (!text.includes("\0")) return text.replaceAll("\r\n", "\n");
    } catch {}
    throw new Error(`${file.name} is not a text in UTF-8 or UTF-16.`);
  }

  /** Lets the browser save a text. */
  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    // The browser may read it later.
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  /** A file name that is valid in every file system. */
  const fileName = (text) => text.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";

  return { fileName, read, save };
})();
