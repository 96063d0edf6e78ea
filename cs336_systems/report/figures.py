"""What all figures share: colours that colour-blind readers can tell apart (Okabe and Ito 2008)."""

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
