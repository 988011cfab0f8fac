// Display names of machines. The rail keeps them current; every page shows them with the name that addresses a machine.
/** Around text of either direction, where no element can be used. */
const [ISOLATE, END] = [String.fromCharCode(0x2068), String.fromCharCode(0x2069)];

/** The text in lower case, with composed characters, as the service searches it. */
export const searched = (text: string) => text.toLowerCase().normalize('NFC');

class MachineNames {
  all = $state.raw<Record<string, string>>({});

  /** A machine's display name, if it has one. */
  of(machine: string): string | undefined {
    return Object.hasOwn(this.all, machine) ? this.all[machine] : undefined;
  }

  /** The machine that a text names: by its display name in any case, else unchanged. */
  named(text: string): string {
    const found = Object.entries(this.all).find(([, name]) => searched(name) === searched(text));
    return found?.[0] ?? text;
  }

  /** Both names in one text. A name in another direction keeps it to itself. */
  both(machine: string): string {
    const name = this.of(machine);
    return name ? `${ISOLATE}${name}${END} (${machine})` : machine;
  }
}
export const machineNames = new MachineNames();
