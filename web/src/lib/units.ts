// Times and sizes in words. Sizes are bytes, times milliseconds since 1970.
const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

export function size(bytes: number | null | undefined): string {
  if (bytes === null || bytes === undefined) return '–';
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** A duration in its two largest units: `3 d 4 h`. */
export function duration(ms: number): string {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return minutes < 10 && seconds % 60 ? `${minutes} min ${seconds % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return hours < 10 && minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return days < 60 ? `${days} d` : `${Math.round(days / 30.4)} months`;
}

/** A duration of what only gets older: without seconds once it lasts minutes. */
export function elapsed(ms: number): string {
  return duration(ms < 60_000 ? ms : Math.floor(ms / 60_000) * 60_000);
}

/** Two clocks may differ by a minute before a time is called future. */
export function age(ms: number, now: number): string {
  return now - ms < -60_000 ? 'in the future' : `${elapsed(now - ms)} ago`;
}

const pad = (number: number) => String(number).padStart(2, '0');
const WEEKDAYS = ['Sun', 'Mon', 'Tue', 'Wed', 'Thu', 'Fri', 'Sat'];
const MONTHS = ['Jan', 'Feb', 'Mar', 'Apr', 'May', 'Jun', 'Jul', 'Aug', 'Sep', 'Oct', 'Nov', 'Dec'];

/** In this browser's time zone: `Mon 23 Nov 2026, 10:02`. */
export function moment(ms: number): string {
  const date = new Date(ms);
  return `${WEEKDAYS[date.getDay()]} ${date.getDate()} ${MONTHS[date.getMonth()]} ${date.getFullYear()}, ${clock(ms)}`;
}

export function day(ms: number): string {
  const date = new Date(ms);
  return `${WEEKDAYS[date.getDay()]} ${date.getDate()} ${MONTHS[date.getMonth()]}`;
}

/** Without the weekday, for axes: `23 Nov 2026`. */
export function date(ms: number): string {
  const at = new Date(ms);
  return `${at.getDate()} ${MONTHS[at.getMonth()]} ${at.getFullYear()}`;
}

export function clock(ms: number, withSeconds = false): string {
  const date = new Date(ms);
  return `${pad(date.getHours())}:${pad(date.getMinutes())}${withSeconds ? `:${pad(date.getSeconds())}` : ''}`;
}

export function count(number: number, word: string, words = `${word}s`): string {
  return `${number.toLocaleString('en')} ${number === 1 ? word : words}`;
}
