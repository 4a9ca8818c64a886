"""Word lists and random values that the task generator draws from."""

CONSONANTS = "bdfgjklmnprstvz"
VOWELS = "aeiou"
CITIES = (
    "Oslo Bergen Paris Lyon Berlin Hamburg Munich Vienna Graz Zurich Basel Rome Milan Turin Madrid Lisbon Porto London Leeds "
    "Dublin Ghent Delft Prague Brno Warsaw Gdansk Riga Tallinn Helsinki Turku Malmo Athens Cairo Tunis Accra Nairobi Mumbai "
    "Pune Delhi Tokyo Osaka Kyoto Seoul Busan Hanoi Manila Sydney Perth Toronto Boston Denver Austin Seattle Lima Quito"
).split()
FIRST_NAMES = (
    "Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Karin Leo Mia Nils Olga Paul Rosa Sam Tina Uwe Vera Willy Yara Zoe "
    "Amir Bela Chen Dana Eli Fatma Goran Hana Ivan Jana Kofi Lena Marco Nora Omar Petra Ravi Sara Tomas Udo Victor Wen"
).split()
ROOMS = "kitchen bedroom hall office garage cellar attic bathroom garden studio".split()
ITEMS = (
    "milk bread apples rice coffee tea sugar paper pens lamps chairs screws paint cables soap towels batteries filters tiles "
    "gloves candles boxes bags plates"
).split()
TOPICS = (
    "trains gardens rivers music chess robots sailing history painting cooking birds stars bridges poems castles markets "
    "winter forests maps clocks"
).split()
COURSES = (
    "Algebra Biology Chemistry Drawing English French Geology History Italian Latin Logic Music Physics Poetry Spanish".split()
)
COLOURS = "red green blue white yellow orange purple pink".split()


def name(rng, syllables=(2, 3)):
    """An invented capitalised name, so that copying it can't be replaced by remembering it."""
    text = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(*syllables)))
    return (text + rng.choice("lnrs") if rng.random() < 0.4 else text).capitalize()


def person(rng):
    """A first name with an invented family name."""
    return f"{rng.choice(FIRST_NAMES)} {name(rng)}"


def place(rng):
    """A city, known or invented."""
    return rng.choice(CITIES) if rng.random() < 0.6 else name(rng)


def digits(rng, count):
    """A run of `count` random digits, as text."""
    return "".join(rng.choice("0123456789") for _ in range(count))


def clock(rng):
    """A time of day, HH:MM."""
    return f"{rng.randrange(24):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def date(rng):
    """A date of the years 2026 to 2029, ISO 8601."""
    return f"{rng.randint(2026, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def code(rng):
    """A short reference: letters, then digits."""
    return "".join(rng.choice("ABCDEFGHKLMNPRSTUVWX") for _ in range(2)) + digits(rng, rng.randint(3, 4))
