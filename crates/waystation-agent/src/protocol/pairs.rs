//! Maps in JSON, whose objects have only text for keys: as lists of pairs. A key that is there twice is refused.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub fn serialize<K, V, S>(map: &BTreeMap<K, V>, serializer: S) -> Result<S::Ok, S::Error>
where
    K: Serialize,
    V: Serialize,
    S: Serializer,
{
    serializer.collect_seq(map)
}

pub fn deserialize<'a, K, V, D>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
where
    K: Deserialize<'a> + Ord,
    V: Deserialize<'a>,
    D: Deserializer<'a>,
{
    let pairs = Vec::<(K, V)>::deserialize(deserializer)?;
    let count = pairs.len();
    let map = BTreeMap::from_iter(pairs);
    if map.len() == count { Ok(map) } else { Err(D::Error::custom("a key is there twice")) }
}
