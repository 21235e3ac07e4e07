"""Tests of the search for the header."""

from penstock.ingest.inspect.headers import find_header


def test_a_header_is_found_among_other_rows() -> None:
    """I17: addresses and data are not detected as a header."""
    head = [["ООО Ромашка", "", "", ""], ["Тел.", "+7 495 1234567", "", ""], ["", "", "", ""]]
    data = [[f"A-{n}", f"Товар {n}", f"{n},50", str(n)] for n in range(20)]
    header = find_header([*head, ["Артикул", "Название", "Цена", "Шт"], *data])
    assert header is not None
    assert header.numbers == [4]
    assert find_header(data) is None
    # A row directly above a header does not belong to it, unless it distinguishes columns.
    shifted = [["Тел.: 1", "", "Почта: a@b.ru", "", ""], ["", "Артикул", "Название", "Цена", "Шт"]]
    found = find_header([*shifted, *(["", *row] for row in data)])
    assert found is not None
    assert found.numbers == [2]
    grouped = [["Товар", "", "Цена", "", "Остаток", ""], ["Артикул", "Название", "Омск", "Тверь", "Омск", "Тверь"]]
    found = find_header([*grouped, *([*row, row[3], row[3]] for row in data)])
    assert found is not None
    assert found.names[2:] == ["Цена / Омск", "Цена / Тверь", "Остаток / Омск", "Остаток / Тверь"]
