//! Hexadecimal digits, as used in JSON documents, file names and URLs. They are written in lower case.

use std::fmt::Write;

/// Two digits per byte.
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The bytes of an even number of digits, lower or upper case; `None` if the text has other characters.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let digit =
        |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |pair: &[u8]| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?);
    text.as_bytes().chunks(2).map(byte).collect()
}

/// The bytes of exactly `2 * N` digits in lower case.
pub fn decode_lower<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_lower = !text.bytes().any(|digit| digit.is_ascii_uppercase());
    decode(text).filter(|_| is_lower)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_as_they_were_written() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&bytes)).unwrap(), bytes);
        assert_eq!(decode_lower(&encode(&bytes)), <[u8; 256]>::try_from(bytes).ok());
        assert_eq!(encode(&[0, 171]), "00ab");
    }

    #[test]
    fn other_texts_are_refused() {
        assert_eq!(decode("0AfF"), Some(vec![0x0a, 0xff]));
        for text in ["0", "0g", "+1", "\u{e4}"] {
            assert_eq!(decode(text), None, "{text}");
        }
        for text in ["", "AB", "abc", "abcd"] {
            assert_eq!(decode_lower::<1>(text), None, "{text}");
        }
    }
}
