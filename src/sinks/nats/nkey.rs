//! NKeys: Ed25519 keys as NATS spells them, in base32 with a prefix and a checksum.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{Ed25519KeyPair, KeyPair};

const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
/// `S`, for seeds.
const SEED: u8 = 18 << 3;
/// `U`, for users.
const USER: u8 = 20 << 3;

/// The key of a user. Prints nothing of itself.
pub(super) struct UserKey(Ed25519KeyPair);

impl UserKey {
    /// From a seed such as `SUAC…`; none if it is not the seed of a user.
    pub(super) fn from_seed(text: &str) -> Option<Self> {
        let bytes = decode(text)?;
        let (content, checksum) = bytes.split_last_chunk::<2>()?;
        let [first, second, seed @ ..] = content else {
            return None;
        };
        let kind = (first & 0b0000_0111) << 5 | second >> 3;
        let is_user = first & 0b1111_1000 == SEED && kind == USER;
        if seed.len() != 32 || !is_user || crc16(content) != u16::from_le_bytes(*checksum) {
            return None;
        }
        Ed25519KeyPair::from_seed_unchecked(seed).ok().map(Self)
    }

    /// What the server knows the user by, such as `UDXU…`.
    pub(super) fn public(&self) -> String {
        let mut bytes = vec![USER];
        bytes.extend_from_slice(self.0.public_key().as_ref());
        bytes.extend_from_slice(&crc16(&bytes).to_le_bytes());
        encode(&bytes)
    }

    /// The signature of what the server asks to be signed.
    pub(super) fn sign(&self, nonce: &str) -> String {
        URL_SAFE_NO_PAD.encode(self.0.sign(nonce.as_bytes()))
    }
}

fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 5 / 8);
    let (mut held, mut bits) = (0_u32, 0);
    for letter in text.bytes() {
        let value = ALPHABET.iter().position(|known| *known == letter)?;
        held = held << 5 | value as u32;
        bits += 5;
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits) as u8);
            held &= (1 << bits) - 1;
        }
    }
    Some(bytes)
}

fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 8 / 5 + 1);
    let (mut held, mut bits) = (0_u32, 0);
    let letter = |value: u32| char::from(ALPHABET[value as usize & 31]);
    for &byte in bytes {
        held = held << 8 | u32::from(byte);
        bits += 8;
        while bits >= 5 {
            bits -= 5;
            text.push(letter(held >> bits));
            held &= (1 << bits) - 1;
        }
    }
    if bits > 0 {
        text.push(letter(held << (5 - bits)));
    }
    text
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| match crc & 0x8000 {
            0 => crc << 1,
            _ => crc << 1 ^ 0x1021,
        })
    })
}

#[cfg(test)]
mod tests {
    use ring::signature::{ED25519, UnparsedPublicKey};

    use super::*;

    /// The pair in the documentation of nats-server.
    const KNOWN_SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
    const KNOWN_PUBLIC: &str = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";

    #[test]
    fn a_known_pair() {
        let key = UserKey::from_seed(KNOWN_SEED).unwrap();
        assert_eq!(key.public(), KNOWN_PUBLIC);
    }

    #[test]
    fn what_is_signed_can_be_verified() {
        let key = UserKey::from_seed(KNOWN_SEED).unwrap();
        let signature = URL_SAFE_NO_PAD.decode(key.sign("nonce")).unwrap();
        let public = decode(&key.public()).unwrap();
        let public = UnparsedPublicKey::new(&ED25519, &public[1..33]);
        assert!(public.verify(b"nonce", &signature).is_ok());
        assert!(public.verify(b"other", &signature).is_err());
    }

    #[test]
    fn what_is_no_seed_of_a_user() {
        let mut wrong = KNOWN_SEED.to_owned();
        wrong.replace_range(20..21, "A");
        for text in [
            "",
            "SU",
            &wrong,
            &KNOWN_SEED[..57],
            &KNOWN_SEED.to_lowercase(),
            KNOWN_PUBLIC,
            // The seed of an account.
            "SAAPJQ6HMNWI4M2UKUA6A7JDRF4BMTYWA7JRRPSYQ2PQTT2M7NLCNF4AAA",
            "nothing at all!",
        ] {
            assert!(UserKey::from_seed(text).is_none(), "{text}");
        }
    }

    #[test]
    fn the_checksum_is_xmodem() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
    }
}
