import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { HELP, useKeys } from "../lib/keys";

export function Help({ close }: { close: () => void }): VNode {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  useKeys({ Escape: close, "?": close });
  return (
    <dialog ref={dialog} class="help" onClose={close} aria-label="keys">
      <h2>Keys</h2>
      <dl>
        {HELP.map(([keys, what]) => (
          <div key={keys}>
            <dt>
              {keys.split("  ").map((each) => (
                <kbd key={each}>{each}</kbd>
              ))}
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <button type="button" class="button" onClick={close}>
        Close
      </button>
    </dialog>
  );
}
