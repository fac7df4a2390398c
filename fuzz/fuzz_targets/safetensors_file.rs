//! A file from its first byte on, its length included: whatever part of it has been read, it is refused, or more
//! of it is asked for, or it is read as the reference implementation reads the whole.

#![no_main]

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use waystation_format::Kind;
use waystation_format::safetensors::{header_end, parse};

fuzz_target!(|input: &[u8]| {
    // The first byte says how much of the file was read before its header was looked at.
    let Some((&part, file)) = input.split_first() else { return };
    let file_bytes = file.len() as u64;
    let read = file.len() * (usize::from(part) + 1) / 256;
    let whole = parse(file, file_bytes);
    match parse(&file[..read], file_bytes) {
        // What is beyond the header is never looked at.
        Ok(header) => assert_eq!(Some(header), whole.as_ref().ok().cloned()),
        Err(error) if error.kind() == Kind::InvalidInput => {
            assert!(read < 8 || header_end(file, file_bytes).is_ok_and(|end| (read as u64) < end));
        }
        Err(_) => assert!(whole.is_err()),
    }
    let Ok(header) = whole else { return };
    let reference = SafeTensors::deserialize(file).expect("the reference refuses what we accept");
    assert_eq!(reference.len(), header.tensors.len());
    let mut end = header.data_start;
    for tensor in &header.tensors {
        assert_eq!(tensor.begin, end, "the tensors leave a hole or overlap");
        end = tensor.end;
        let data = reference.tensor(&tensor.name).expect("the reference does not know a name").data();
        let ours = &file[tensor.begin as usize..tensor.end as usize];
        assert_eq!((ours.as_ptr(), ours.len()), (data.as_ptr(), data.len()));
    }
    assert_eq!(end, file_bytes, "bytes follow the tensors");
});
