"""Makes the data of the first task: questions for capitals, in Parquet files.

    python examples/first_task/make_data.py [--out runs/first_task]

The countries of `eval.parquet` are not in `train.parquet`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUM_EVAL = 24
CAPITALS = dict(
    pair.split(" = ")
    for pair in """
Afghanistan = Kabul, Albania = Tirana, Algeria = Algiers, Argentina = Buenos Aires,
Armenia = Yerevan, Australia = Canberra, Austria = Vienna, Azerbaijan = Baku, Bahrain = Manama,
Bangladesh = Dhaka, Belarus = Minsk, Belgium = Brussels, Brazil = Brasilia, Bulgaria = Sofia,
Canada = Ottawa, Chile = Santiago, China = Beijing, Colombia = Bogota, Croatia = Zagreb,
Cuba = Havana, Cyprus = Nicosia, Denmark = Copenhagen, Ecuador = Quito, Egypt = Cairo,
Estonia = Tallinn, Ethiopia = Addis Ababa, Finland = Helsinki, France = Paris, Georgia = Tbilisi,
Germany = Berlin, Ghana = Accra, Greece = Athens, Hungary = Budapest, Iceland = Reykjavik,
India = New Delhi, Indonesia = Jakarta, Iran = Tehran, Iraq = Baghdad, Ireland = Dublin,
Italy = Rome, Jamaica = Kingston, Japan = Tokyo, Jordan = Amman, Kenya = Nairobi, Latvia = Riga,
Lebanon = Beirut, Libya = Tripoli, Lithuania = Vilnius, Malaysia = Kuala Lumpur,
Mongolia = Ulaanbaatar, Morocco = Rabat, Nepal = Kathmandu, New Zealand = Wellington,
Nigeria = Abuja, Norway = Oslo, Pakistan = Islamabad, Peru = Lima, Poland = Warsaw,
Portugal = Lisbon, Qatar = Doha, Romania = Bucharest, Russia = Moscow, Rwanda = Kigali,
Saudi Arabia = Riyadh, Senegal = Dakar, Serbia = Belgrade, Slovakia = Bratislava,
Slovenia = Ljubljana, South Korea = Seoul, Spain = Madrid, Sudan = Khartoum, Sweden = Stockholm,
Syria = Damascus, Thailand = Bangkok, Tunisia = Tunis, Turkey = Ankara, Uganda = Kampala,
Ukraine = Kyiv, Uruguay = Montevideo, Venezuela = Caracas, Vietnam = Hanoi, Zambia = Lusaka,
Zimbabwe = Harare
""".replace("\n", " ").strip().split(", ")
)  # fmt: skip


def question(country: str) -> dict[str, Any]:
    """Returns a row in verl's schema."""
    return {
        "data_source": "capitals",
        "prompt": [{"role": "user", "content": f"What is the capital of {country}?"}],
        "reward_model": {"style": "rule", "ground_truth": CAPITALS[country]},
    }


def make_data(out: Path) -> None:
    """Writes train.parquet and eval.parquet into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    countries = sorted(CAPITALS)
    random.Random(0).shuffle(countries)
    for name, part in (("eval", countries[:NUM_EVAL]), ("train", countries[NUM_EVAL:])):
        rows = [question(country) for country in part]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="data of the first task")
    parser.add_argument("--out", type=Path, default=Path("runs/first_task"))
    make_data(parser.parse_args().out)
