"""The field name of a column, from a vocabulary or transliterated, and the content that its header suggests."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from penstock.ingest.transform.gate import normalize_name

# Words that a field name does not need.
_NOISE = re.compile(
    r"\b(?:руб(?:лей|ля|\.)?|р\.|rub|usd|eur|шт(?:ук|\.)?|pcs|мм|см|кг|гр?|kg|mm|cm|lbs?|л|товара|товаров|продукта|"
    r"позиции|на складе|склад[еа]?|складах|с ндс|без ндс|вкл|ндс|за ед|за шт|за|в|на|на текущую дату|value|product|"
    r"цен[аы]?|price|item)(?!\w)"
)
_LETTERS = {
    "а": "a", "б": "b", "в": "v", "г": "g", "д": "d", "е": "e", "ё": "e", "ж": "zh", "з": "z", "и": "i", "й": "y",
    "к": "k", "л": "l", "м": "m", "н": "n", "о": "o", "п": "p", "р": "r", "с": "s", "т": "t", "у": "u", "ф": "f",
    "х": "kh", "ц": "ts", "ч": "ch", "ш": "sh", "щ": "shch", "ъ": "", "ы": "y", "ь": "", "э": "e", "ю": "yu",
    "я": "ya", "і": "i", "ї": "yi", "є": "ye", "ґ": "g",
}  # fmt: skip
_HUMP = re.compile(r"(?<=[a-zа-я0-9])(?=[A-ZА-Я][a-zа-я])")  # of vendorCode
_COUNT = re.compile(r"(?<=.) / \d{1,2}$")  # of a row that numbers the columns
DATED = re.compile(r"(?:(?:на|от|от даты)? )?\b\d{1,2}[./]\d{1,2}[./](?:20)?\d{2}\b(?: ?г\.?)?|\b20\d\d-\d\d-\d\d\b")
_LONGEST = 60


class ColumnHint(StrEnum):
    """The content that the header of a column suggests."""

    CODE = "code"
    TEXT = "text"
    GROUP = "group"
    MONEY = "money"
    QUANTITY = "quantity"
    MEASURE = "measure"
    MOMENT = "moment"
    COUNTER = "counter"
    NONE = "none"


@dataclass(frozen=True)
class ColumnMeaning:
    """The meaning of a header: *name* is the usual field name, *rest* the other words, *all_rest* also units.

    *other* is the field name if the usual name is taken.
    """

    name: str
    rest: str
    all_rest: str
    other: str
    hint: ColumnHint
    rank: int

    @property
    def is_known(self) -> bool:
        return self.hint is not ColumnHint.NONE


# The first match counts, so specific patterns come before general patterns.
_WORDS: tuple[tuple[str, str, str, ColumnHint], ...] = (
    (r"^(?:№|n|no\.?|#|№ ?п ?/ ?п|п ?/ ?п|номер п/п|row|line)$", "number", "number", ColumnHint.COUNTER),
    (r"штрих[- ]?код\w*|\bean(?:[- ]?13)?\b|\bgtin\b|\bupc\b|bar ?code", "barcode", "barcode", ColumnHint.CODE),
    (r"\bррц\b|\bмрц\b|рекоменд\w* (?:розничн\w* )?цен\w*|\brrp\b|\bmsrp\b|цен\w* / розн\w*|розничн\w*(?: цен\w*)?"
     r"|цен\w* розн\w*\.?|^розница$|retail(?: price)?|price retail", "retail_price", "rrp", ColumnHint.MONEY),
    (r"цен\w* / опт\w*|оптов\w*(?: цен\w*)?|цен\w* опт\w*\.?|^опт\.?$|wholesale(?: price)?|dealer price|price wholesale"
     r"|дилер\w* цен\w*|закуп\w*(?: цен\w*)?|цен\w* закуп\w*", "wholesale_price", "dealer_price", ColumnHint.MONEY),
    (r"\.currency\w*$|^валют\w*|^currency", "currency", "currency", ColumnHint.GROUP),
    (r"\bцен[аыу]?\b|\bprices?\b|стоимост\w*|\bcost\b|\bсумма\b|\bamount\b|\bпрайс\b",
     "price", "cost", ColumnHint.MONEY),
    (r"\bед\.? ?(?:изм\w*\.?)?$|единиц\w*(?: измерения)?|\bunits?\b|\buom\b", "unit", "unit", ColumnHint.GROUP),
    (r"^мин\w*\.? (?:партия|заказ|кол)\S*|^min\.? (?:order|qty|quantity)|^moq$",
     "min_order", "min_qty", ColumnHint.QUANTITY),
    (r"^(?:кратность|упаковк\w*|pack(?: size)?$)", "pack", "pack_size", ColumnHint.QUANTITY),
    (r"остат\w*|кол-?во\b|кол\.|количеств\w*|наличи\w*|\bсклад\w*|\bstock\b|\bqty\b|quantity|availab\w*|on hand"
     r"|in stock", "qty", "stock", ColumnHint.QUANTITY),
    (r"артикул\w*|\bарт\b\.?|\bsku\b|^article(?: no\.?| number)?$|vendor ?code|part ?(?:number|no)\.?|\bmpn\b"
     r"|item ?(?:no\.?|number|code)", "sku", "vendor_code", ColumnHint.CODE),
    (r"^код(?: товара| номенклатуры| позиции)?$|^(?:product |item )?code$", "sku", "code", ColumnHint.CODE),
    (r"сер(?:ийный|\.) номер|serial(?: no\.?| number)?", "serial", "serial", ColumnHint.CODE),
    (r"телефон\w*|phone", "phone", "phone", ColumnHint.CODE),
    (r"\bинн\b", "inn", "inn", ColumnHint.CODE),
    (r"тн ?вэд", "tnved", "tnved", ColumnHint.CODE),
    (r"\bид\b|\bid\b|\bкод\b", "id", "code", ColumnHint.CODE),
    (r"бренд\w*|производител\w*|\bмарка\b|brand|manufacturer|\bvendor\b|\bmake\b",
     "brand", "manufacturer", ColumnHint.GROUP),
    (r"категори\w*|\bгруппа\b|подгруппа|раздел|categor(?:y|ies)|\bgroup\b|product type",
     "category", "group", ColumnHint.GROUP),
    (r"описани\w*|примечани\w*|коммент\w*|description|comments?\b|\bnotes?\b",
     "description", "comment", ColumnHint.TEXT),
    (r"наименован\w*|названи\w*|номенклатура|^товар(?:ы)?$|\bname\b|^title$|^product$|^item$",
     "name", "title", ColumnHint.TEXT),
    (r"^модель|\bmodel\b", "model", "model", ColumnHint.TEXT),
    (r"дата|\bdate\b|обновлен\w*|updated?(?: ?at)?\b|срок годности|^поступление", "date", "date", ColumnHint.MOMENT),
    (r"\bвес\b|\bмасса\b|weight", "weight", "weight", ColumnHint.MEASURE),
    (r"\bобъ[её]м\b|volume", "volume", "volume", ColumnHint.MEASURE),
    (r"\bширина\b|\bwidth\b", "width", "width", ColumnHint.MEASURE),
    (r"\bвысота\b|\bheight\b|\bпрофиль\b", "height", "height", ColumnHint.MEASURE),
    (r"\bдлина\b|\blength\b", "length", "length", ColumnHint.MEASURE),
    (r"\bдиаметр\b|\bdiameter\b", "diameter", "diameter", ColumnHint.MEASURE),
    (r"^сезон\w*|\bseason\b", "season", "season", ColumnHint.GROUP),
    (r"^страна\w*(?: происхождения)?|country(?: of origin)?", "country", "country", ColumnHint.GROUP),
    (r"^цвет|colou?r", "color", "color", ColumnHint.GROUP),
    (r"^(?:фото|картинка|изображение|ссылка|url|link|image|picture)\w*", "url", "image", ColumnHint.TEXT),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), name, other, hint) for pattern, name, other, hint in _WORDS)


@lru_cache(maxsize=20_000)
def find_meaning(header: str) -> ColumnMeaning:
    """Return the most likely meaning of *header*."""
    text = DATED.sub(" ", _COUNT.sub("", normalize_name(_HUMP.sub(" ", header)).replace("_", " "))).strip()
    own = to_snake_case(text) or "column"
    if len(text) <= _LONGEST * 2:
        for rank, (pattern, name, other, hint) in enumerate(_COMPILED):
            if match := pattern.search(text):
                rest = f"{text[: match.start()]} {text[match.end() :]}"
                return ColumnMeaning(
                    name, _transliterate(_NOISE.sub(" ", rest)), _transliterate(rest), other, hint, rank
                )
    return ColumnMeaning(to_snake_case(_NOISE.sub(" ", text)) or own, "", "", own, ColumnHint.NONE, len(_COMPILED))


def to_snake_case(text: str) -> str:
    """Return *text* as a name in lower-case Latin letters with underscores; empty if no letters are left."""
    words = _transliterate(text)
    return f"n{words}" if words[:1].isdigit() else words


def _transliterate(text: str) -> str:
    latin = "".join(_LETTERS.get(letter, letter) for letter in text.casefold())
    return re.sub(r"[^a-z0-9]+", "_", latin).strip("_")[:_LONGEST].strip("_")
