"""Common short words, each of them one token in the vocabularies of large models."""

TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also did many off before must well back through years much where your way down should "
    "because long each just state those people too mr how little good world make very year still see own work men day "
    "get here old between both life being under three never know same last another while us might great go come since "
    "against right came take used himself few house use place american during high without again home around small "
    "however found part school water once general upon every war fact thought public number left set course city door"
)
WORDS = TEXT.split()
