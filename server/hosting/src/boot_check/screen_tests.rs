use super::*;

/// A ROM with a made-up font: the bits of a character are its code, turned by the row.
fn rom() -> Vec<u8> {
    let mut rom = vec![0xff; 100];
    for code in 0..=255_u8 {
        rom.extend(glyph(code));
    }
    rom.resize(rom.len() + 100, 0xff);
    rom
}

fn glyph(code: u8) -> [u8; GLYPH_BYTES] {
    match code {
        b'A' => LETTER_A,
        0 | b' ' | 0xff => [0; GLYPH_BYTES],
        _ => std::array::from_fn(|row| code.rotate_left(u32::try_from(row).unwrap())),
    }
}

/// A picture with this text from its top on, in colours that differ from line to line.
fn picture(width: usize, height: usize, cell_width: usize, text: &str) -> Vec<u8> {
    let mut pixels = vec![0; width * height * 3];
    for (row, line) in text.lines().enumerate() {
        for (column, code) in line.bytes().enumerate() {
            for (y, bits) in glyph(code).into_iter().enumerate() {
                for x in 0..8 {
                    let place = (row * 16 + y) * width + column * cell_width + x;
                    let colour = if bits >> (7 - x) & 1 == 1 { 200 } else { row as u8 };
                    pixels[place * 3..place * 3 + 3].fill(colour);
                }
            }
        }
    }
    [format!("P6\n{width} {height}\n255\n").into_bytes(), pixels].concat()
}

fn read(file: &[u8]) -> Option<String> {
    Font::from_rom(&rom()).unwrap().read(&Picture::parse(file).unwrap())
}

#[test]
fn text_is_read_exactly() {
    let text = "No bootable device.\n\n  AAA 123 $ ~";
    assert_eq!(read(&picture(720, 400, 9, text)).unwrap(), text);
    assert_eq!(read(&picture(1024, 768, 8, text)).unwrap(), text);
}

#[test]
fn a_cursor_is_left_out_and_a_graphical_picture_has_no_text() {
    let mut file = picture(720, 400, 9, "login:");
    let start = file.len() - 720 * 400 * 3;
    let cell = |x: usize, y: usize| start + (y * 720 + 7 * 9 + x) * 3;
    for x in 0..8 {
        file[cell(x, 13)] = 99;
        file[cell(x, 15)] = 99;
    }
    // At the end of the text it is left out.
    assert_eq!(read(&file).unwrap(), "login:");
    for (i, byte) in file[start..].iter_mut().enumerate() {
        *byte = (i / 7 * i % 251) as u8;
    }
    assert_eq!(read(&file), None);
}

#[test]
fn only_whole_pictures_are_parsed() {
    let file = picture(16, 16, 8, "");
    assert!(Picture::parse(&file).is_some());
    for length in 0..file.len() {
        assert!(Picture::parse(&file[..length]).is_none(), "{length}");
    }
    for file in [
        "P5\n1 1\n255\nabc",
        "P6\n1 1\n65535\nabc",
        "P6\n0 0\n255\n",
        "P6\n99999999999999999999 1\n255\n",
        "P6\n4294967296 4294967296\n255\n",
        "P6\n-1 1\n255\nabc",
    ] {
        assert!(Picture::parse(file.as_bytes()).is_none(), "{file}");
    }
}

#[test]
fn a_rom_without_a_font_is_rejected() {
    assert!(Font::from_rom(&[]).is_none());
    // Too little before the letter, or after it.
    assert!(Font::from_rom(&LETTER_A).is_none());
    assert!(Font::from_rom(&rom()[..3000]).is_none());
}
