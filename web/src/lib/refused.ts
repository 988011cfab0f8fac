// The field that the service refused: its messages about a document begin with the field's name.

export interface Refused {
  /** Names of the API, such as `boot_check.on`. */
  fields: string[];
  text: string;
}

/** `schedule: …` and `agent, consistent_every_minutes: …`; nothing if the message names no field. */
export function refusedBy(message: string): Refused | undefined {
  const [, names, text] = /^([a-z_.]+(?:, [a-z_.]+)*): (.+)$/s.exec(message) ?? [];
  return names && text ? { fields: names.split(', '), text } : undefined;
}
