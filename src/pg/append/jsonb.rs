//! Writes jsonb as it is stored: a container's header, an entry for each key and value, and what they hold, one behind the other.
//!
//! The layout is the server's own (`utils/jsonb.h`), which is on disk and so the same in every version. Knows nothing of where values
//! come from.

use pgrx::pg_sys;

/// A value of an object.
#[derive(Debug, Clone, Copy)]
pub(super) enum Member<'a> {
    Null,
    Bool(bool),
    /// A numeric as it is stored in memory, with its four-byte header.
    Numeric(&'a [u8]),
    String(&'a [u8]),
    /// What a jsonb holds behind its own header, unless that is a single value.
    Container(&'a [u8]),
}

impl<'a> Member<'a> {
    /// Of what a jsonb holds behind its own header.
    pub(super) fn of_root(root: &'a [u8]) -> Self {
        if word(root, 0) & pg_sys::JB_FSCALAR == 0 {
            return Self::Container(root);
        }
        // A single value is kept as the only one of an array.
        let value = root.get(8..).unwrap_or_default();
        match word(root, 4) & pg_sys::JENTRY_TYPEMASK {
            pg_sys::JENTRY_ISSTRING => Self::String(value),
            pg_sys::JENTRY_ISNUMERIC => Self::Numeric(value),
            pg_sys::JENTRY_ISBOOL_TRUE => Self::Bool(true),
            pg_sys::JENTRY_ISBOOL_FALSE => Self::Bool(false),
            _ => Self::Null,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let four = bytes.get(at..at + 4).and_then(|four| four.try_into().ok());
    u32::from_ne_bytes(four.unwrap_or_default())
}

/// An object that is being written.
pub(super) struct Object {
    /// Where it begins, before what aligns it.
    start: usize,
    entries: usize,
    next: usize,
    total: usize,
    fits: bool,
}

/// A jsonb that is being written.
#[derive(Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

/// What a length or an offset within a container can say at most.
const LONGEST: usize = pg_sys::JENTRY_OFFLENMASK as usize;

impl Writer {
    /// Begins anew, behind the header of a stored value.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.resize(size_of::<u32>(), 0);
    }

    /// All of it; the first four bytes are for the header of a stored value.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn align(&mut self) {
        let size = self.bytes.len().next_multiple_of(size_of::<u32>());
        self.bytes.resize(size, 0);
    }

    /// Begins an object of so many members. First come its keys, shorter ones first and those of one length in the order of their bytes;
    /// then the values in the same order.
    pub(super) fn object(&mut self, members: usize) -> Object {
        let start = self.bytes.len();
        self.align();
        let count = u32::try_from(members).unwrap_or(u32::MAX) & pg_sys::JB_CMASK;
        let header = pg_sys::JB_FOBJECT | count;
        self.bytes.extend_from_slice(&header.to_ne_bytes());
        let entries = self.bytes.len();
        self.bytes
            .resize(entries + 2 * members * size_of::<u32>(), 0);
        Object {
            start,
            entries,
            next: 0,
            total: 0,
            fits: true,
        }
    }

    fn entry(&mut self, object: &mut Object, kind: u32, length: usize) {
        object.total += length;
        object.fits &= object.total <= LONGEST;
        let said = if object
            .next
            .is_multiple_of(pg_sys::JB_OFFSET_STRIDE as usize)
        {
            pg_sys::JENTRY_HAS_OFF | object.total as u32 & pg_sys::JENTRY_OFFLENMASK
        } else {
            length as u32 & pg_sys::JENTRY_OFFLENMASK
        };
        let at = object.entries + object.next * size_of::<u32>();
        self.bytes[at..at + size_of::<u32>()].copy_from_slice(&(kind | said).to_ne_bytes());
        object.next += 1;
    }

    pub(super) fn key(&mut self, object: &mut Object, name: &[u8]) {
        self.bytes.extend_from_slice(name);
        self.entry(object, pg_sys::JENTRY_ISSTRING, name.len());
    }

    pub(super) fn value(&mut self, object: &mut Object, member: Member) {
        let start = self.bytes.len();
        let kind = match member {
            Member::Null => pg_sys::JENTRY_ISNULL,
            Member::Bool(true) => pg_sys::JENTRY_ISBOOL_TRUE,
            Member::Bool(false) => pg_sys::JENTRY_ISBOOL_FALSE,
            Member::String(text) => {
                self.bytes.extend_from_slice(text);
                pg_sys::JENTRY_ISSTRING
            }
            Member::Numeric(stored) => {
                self.align();
                self.bytes.extend_from_slice(stored);
                pg_sys::JENTRY_ISNUMERIC
            }
            Member::Container(stored) => {
                self.align();
                self.bytes.extend_from_slice(stored);
                pg_sys::JENTRY_ISCONTAINER
            }
        };
        let length = self.bytes.len() - start;
        self.entry(object, kind, length);
    }

    /// An object within another is through: it is the other's next value.
    pub(super) fn close_within(&mut self, inner: &Object, outer: &mut Object) {
        outer.fits &= inner.fits;
        let length = self.bytes.len() - inner.start;
        self.entry(outer, pg_sys::JENTRY_ISCONTAINER, length);
    }

    /// The whole is through. False if it is beyond what jsonb can hold.
    #[must_use]
    pub(super) fn close(&self, object: &Object) -> bool {
        object.fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(bytes: &[u8]) -> Vec<u32> {
        (0..bytes.len() / 4)
            .map(|place| word(bytes, place * 4))
            .collect()
    }

    #[test]
    fn an_object_is_laid_out_as_the_server_does() {
        let mut writer = Writer::default();
        writer.clear();
        let mut object = writer.object(3);
        for key in ["a", "b", "cc"] {
            writer.key(&mut object, key.as_bytes());
        }
        writer.value(&mut object, Member::Bool(true));
        writer.value(&mut object, Member::String(b"xyz"));
        writer.value(&mut object, Member::Null);
        assert!(writer.close(&object));
        let bytes = writer.bytes();
        // As of '{"a": true, "b": "xyz", "cc": null}'.
        assert_eq!(
            words(&bytes[4..32]),
            [0x2000_0003, 0x8000_0001, 1, 2, 0x3000_0000, 3, 0x4000_0000]
        );
        assert_eq!(&bytes[32..], b"abccxyz");
    }

    #[test]
    fn containers_are_aligned_and_every_thirty_second_entry_is_an_offset() {
        let mut writer = Writer::default();
        writer.clear();
        let mut outer = writer.object(17);
        for key in 0..17u8 {
            writer.key(&mut outer, &[b'a' + key]);
        }
        for _ in 0..16 {
            writer.value(&mut outer, Member::String(b"12"));
        }
        let inner = writer.object(0);
        writer.close_within(&inner, &mut outer);
        assert!(writer.close(&outer));
        let bytes = writer.bytes();
        let entries = words(&bytes[8..8 + 34 * 4]);
        assert_eq!(entries[0], 0x8000_0001);
        assert_eq!(entries[31], 2);
        // 17 bytes of keys and 16 values of two bytes: 49, and three that align the object's four.
        assert_eq!(entries[32], 0x8000_0000 | (17 + 32));
        assert_eq!(entries[33], 0x5000_0000 | 7);
        assert_eq!(bytes.len(), 4 + 4 + 34 * 4 + 49 + 7);
    }

    #[test]
    fn a_single_value_is_taken_out_of_its_array() {
        let root = |entry: u32, value: &[u8]| {
            let header = pg_sys::JB_FARRAY | pg_sys::JB_FSCALAR | 1;
            [&header.to_ne_bytes(), &entry.to_ne_bytes(), value].concat()
        };
        let text = root(0x8000_0003, b"abc");
        assert!(matches!(Member::of_root(&text), Member::String(b"abc")));
        let yes = root(0xB000_0000, b"");
        assert!(matches!(Member::of_root(&yes), Member::Bool(true)));
        let nothing = root(0xC000_0000, b"");
        assert!(matches!(Member::of_root(&nothing), Member::Null));
        let array = [pg_sys::JB_FARRAY.to_ne_bytes()].concat();
        assert!(matches!(Member::of_root(&array), Member::Container(_)));
    }
}
