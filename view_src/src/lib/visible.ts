// What cannot be seen is shown: controls, bidirectional and zero-width characters, and lone surrogates.

const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udfff]/g;

/** Return text in which every character can be seen; newlines and tabs stay. */
export function visible(text: string): string {
  return text.replace(UNSEEN, (found) => `\\u{${(found.codePointAt(0) ?? 0).toString(16)}}`);
}

/** Return text on one line. */
export function oneLine(text: string): string {
  return visible(text).replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
}

/** Return text as a quoted literal, for tables of tokens. */
export function quoted(text: string): string {
  return `"${visible(text).replace(/\n/g, "\\n").replace(/\t/g, "\\t")}"`;
}
