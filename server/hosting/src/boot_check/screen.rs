//! The text of a screen in text mode, looked up in the font of the video card.
//!
//! A text screen has cells of 9×16 pixels, a framebuffer console has cells of 8×16. QEMU's video
//! ROM contains the font, so that each cell is found exactly; a guess of characters is not needed.
//! Other fonts are not recognized: then the picture has no text.

use std::collections::HashMap;
use std::path::Path;

use coldrise_host::Host;

use super::signs::UNKNOWN;

/// Where distributions install the ROM.
const ROMS: [&str; 3] = [
    "/usr/share/seabios/vgabios-stdvga.bin",
    "/usr/share/qemu/vgabios-stdvga.bin",
    "/usr/share/seavgabios/vgabios-stdvga.bin",
];
/// Larger files are not a ROM.
const MAX_ROM_BYTES: u64 = 1 << 20;
/// The letter A, by which the font is found in the ROM.
const LETTER_A: [u8; GLYPH_BYTES] =
    [0, 0, 0x10, 0x38, 0x6c, 0xc6, 0xc6, 0xfe, 0xc6, 0xc6, 0xc6, 0xc6, 0, 0, 0, 0];
const GLYPH_BYTES: usize = 16;
const CELL_HEIGHT: usize = 16;
/// The width of a cell without the gap.
const GLYPH_WIDTH: usize = 8;
/// Width and height of the picture of a text screen.
const TEXT_MODE: (usize, usize) = (720, 400);
/// Maximum width and height of a picture.
const MAX_SIDE: usize = 4096;
/// A picture with more than one unknown cell in this number has no text. A cursor is one.
const UNKNOWN_SHARE: usize = 50;

/// A picture of 3 bytes per pixel.
pub(crate) struct Picture {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Picture {
    /// Parses a binary PPM, as QEMU writes it. `None` if it is anything else.
    pub(super) fn parse(file: &[u8]) -> Option<Picture> {
        let mut rest = file.strip_prefix(b"P6")?;
        let mut number = || {
            rest = rest.trim_ascii_start();
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let (number, after) = rest.split_at(digits);
            rest = after;
            std::str::from_utf8(number).ok()?.parse::<usize>().ok()
        };
        let (width, height, maximum) = (number()?, number()?, number()?);
        let pixels = rest.get(1..)?.to_vec();
        let is_sound = (1..=MAX_SIDE).contains(&width) && (1..=MAX_SIDE).contains(&height);
        let is_whole = is_sound && maximum == 255 && pixels.len() == width * height * 3;
        is_whole.then_some(Picture { width, height, pixels })
    }

    /// The 16 rows of a cell: one bit for each pixel that differs from the first one.
    fn cell(&self, left: usize, top: usize) -> Option<[u8; GLYPH_BYTES]> {
        let pixel = |x: usize, y: usize| {
            let start = (y * self.width + x) * 3;
            self.pixels.get(start..start + 3)
        };
        let background = pixel(left, top)?;
        let mut rows = [0; GLYPH_BYTES];
        for (y, row) in rows.iter_mut().enumerate() {
            for x in 0..GLYPH_WIDTH {
                let is_set = pixel(left + x, top + y)? != background;
                *row |= u8::from(is_set) << (GLYPH_WIDTH - 1 - x);
            }
        }
        Some(rows)
    }
}

/// The characters by their bits.
pub(crate) struct Font(HashMap<[u8; GLYPH_BYTES], char>);

impl Font {
    /// The font of the ROM that is installed on QEMU's host; `None` if there is none.
    pub(super) fn installed(host: &Host) -> Option<Font> {
        let mut roms = ROMS.iter().map(Path::new);
        let rom = roms.find_map(|rom| host.read_file(rom, MAX_ROM_BYTES).ok())?;
        Font::from_rom(&rom)
    }

    fn from_rom(rom: &[u8]) -> Option<Font> {
        let letter = rom.windows(GLYPH_BYTES).position(|bits| bits == LETTER_A)?;
        let start = letter.checked_sub(usize::from(b'A') * GLYPH_BYTES)?;
        let glyphs = rom.get(start..start + 256 * GLYPH_BYTES)?;
        let mut font = HashMap::new();
        let ascii = 0x20..0x7f_u8;
        // Blanks and some others have several codes: the one in ASCII counts.
        for code in ascii.clone().chain((0..=255).filter(|code| !ascii.contains(code))) {
            let bits = glyphs.iter().skip(usize::from(code) * GLYPH_BYTES).take(GLYPH_BYTES);
            let bits: Vec<u8> = bits.copied().collect();
            let shown = if ascii.contains(&code) { char::from(code) } else { '.' };
            font.entry(bits.try_into().ok()?).or_insert(shown);
        }
        Some(Font(font))
    }

    /// The text of a picture, lines without trailing blanks; `None` if it is not text.
    pub(super) fn read(&self, picture: &Picture) -> Option<String> {
        let is_text_mode = (picture.width, picture.height) == TEXT_MODE;
        let cell_width = if is_text_mode { GLYPH_WIDTH + 1 } else { GLYPH_WIDTH };
        let (columns, rows) = (picture.width / cell_width, picture.height / CELL_HEIGHT);
        let mut text = String::new();
        let mut unknown = 0;
        for row in 0..rows {
            let mut line = String::new();
            for column in 0..columns {
                let bits = picture.cell(column * cell_width, row * CELL_HEIGHT)?;
                // The first pixel can belong to the character.
                let known = self.0.get(&bits).or_else(|| self.0.get(&bits.map(|row| !row)));
                unknown += usize::from(known.is_none());
                line.push(known.copied().unwrap_or(UNKNOWN));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        // A lone unknown cell after the text is the cursor, half drawn over a blank.
        let text = text.trim_end_matches([UNKNOWN, ' ', '\n']);
        (unknown <= rows * columns / UNKNOWN_SHARE).then(|| text.to_owned())
    }
}

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
