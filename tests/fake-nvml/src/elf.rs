//! Takes dynamic symbols out of a shared object, so that `dlsym` no longer finds them.
//!
//! Works on 64-bit little-endian ELF, in memory. An entry of `.dynsym` loses its name (offset 0, the empty name)
//! and becomes undefined; the string table stays, since linkers let names share tails. The hash section still
//! points at the entry, but the name comparison behind it fails, exactly as for a name that never was.

use std::collections::BTreeSet;

const SECTION_DYNSYM: u32 = 11;
const SYMBOL_SIZE: usize = 24;

/// Why an object could not be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ElfError {
    /// Not a 64-bit little-endian ELF object, or one cut short.
    #[error("not a 64-bit little-endian ELF object with a dynamic symbol table")]
    Malformed,
    /// A symbol to be taken out is not there: the caller's list is wrong.
    #[error("no dynamic symbol {0}")]
    NoSuchSymbol(String),
}

fn bytes<const N: usize>(object: &[u8], at: usize) -> Result<[u8; N], ElfError> {
    object
        .get(at..at.checked_add(N).ok_or(ElfError::Malformed)?)
        .and_then(|slice| slice.try_into().ok())
        .ok_or(ElfError::Malformed)
}

fn u16_at(object: &[u8], at: usize) -> Result<usize, ElfError> {
    Ok(usize::from(u16::from_le_bytes(bytes(object, at)?)))
}

fn u32_at(object: &[u8], at: usize) -> Result<u32, ElfError> {
    Ok(u32::from_le_bytes(bytes(object, at)?))
}

fn usize_at(object: &[u8], at: usize) -> Result<usize, ElfError> {
    usize::try_from(u64::from_le_bytes(bytes(object, at)?)).map_err(|_| ElfError::Malformed)
}

/// Offsets of `.dynsym` entries with their names.
fn dynamic_symbols(object: &[u8]) -> Result<Vec<(usize, String)>, ElfError> {
    if bytes::<6>(object, 0)? != *b"\x7fELF\x02\x01" {
        return Err(ElfError::Malformed);
    }
    let (headers, size, count) = (
        usize_at(object, 0x28)?,
        u16_at(object, 0x3a)?,
        u16_at(object, 0x3c)?,
    );
    let header = |index: usize| {
        index
            .checked_mul(size)
            .and_then(|at| at.checked_add(headers))
            .ok_or(ElfError::Malformed)
    };
    for index in 0..count {
        let at = header(index)?;
        if u32_at(object, at.saturating_add(4))? != SECTION_DYNSYM {
            continue;
        }
        let (table, length) = (
            usize_at(object, at.saturating_add(0x18))?,
            usize_at(object, at.saturating_add(0x20))?,
        );
        let strings = usize_at(
            object,
            header(u32_at(object, at.saturating_add(0x28))? as usize)?.saturating_add(0x18),
        )?;
        return (0..length / SYMBOL_SIZE)
            .map(|nth| {
                let entry = nth.saturating_mul(SYMBOL_SIZE).saturating_add(table);
                let name = object
                    .get(strings.saturating_add(u32_at(object, entry)? as usize)..)
                    .ok_or(ElfError::Malformed)?;
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                Ok((entry, String::from_utf8_lossy(name).into_owned()))
            })
            .collect();
    }
    Err(ElfError::Malformed)
}

/// Names of the defined dynamic symbols of `object`.
///
/// # Errors
/// [`ElfError::Malformed`].
pub fn exported_symbols(object: &[u8]) -> Result<BTreeSet<String>, ElfError> {
    let mut names = BTreeSet::new();
    for (entry, name) in dynamic_symbols(object)? {
        if u16_at(object, entry + 6)? != 0 && !name.is_empty() {
            names.insert(name);
        }
    }
    Ok(names)
}

/// Takes `names` out of `object`.
///
/// # Errors
/// [`ElfError`]; `object` is unchanged then.
pub fn strip_symbols(object: &mut [u8], names: &[&str]) -> Result<(), ElfError> {
    let symbols = dynamic_symbols(object)?;
    let mut entries = Vec::with_capacity(names.len());
    for name in names {
        let found = symbols.iter().find(|(_, known)| known == name);
        entries.push(found.ok_or_else(|| ElfError::NoSuchSymbol((*name).to_owned()))?.0);
    }
    for entry in entries {
        let symbol = object
            .get_mut(entry..entry + SYMBOL_SIZE)
            .ok_or(ElfError::Malformed)?;
        symbol[0..4].fill(0); // st_name
        symbol[6..24].fill(0); // st_shndx, st_value, st_size
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_elf_is_refused() {
        assert_eq!(exported_symbols(b"MZ"), Err(ElfError::Malformed));
        assert_eq!(exported_symbols(&[0; 64]), Err(ElfError::Malformed));
        let mut cut = b"\x7fELF\x02\x01".to_vec();
        cut.resize(0x40, 0xff);
        assert_eq!(strip_symbols(&mut cut, &["a"]), Err(ElfError::Malformed));
    }
}
